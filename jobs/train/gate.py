"""Units whose next update waits while their present weights and states are being saved.

An update of step N + 1 comes a whole forward and backward after that of step N, so a save of the state after step N has
that long for each unit before anything waits, and needs no copy of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable


class Gate:
    """Holds back updates, unit by unit; `wait` is for the executor to call before each."""

    def __init__(self) -> None:
        self._step = 0
        self._saved: dict[str, threading.Event] = {}
        self.waited_s = 0.0
        """Seconds for which updates have waited, since the start."""

    def hold(self, units: Iterable[str], step: int) -> None:
        """Let no update after ``step`` of these units begin until each is released."""
        self._step, self._saved = step, {unit: threading.Event() for unit in units}

    def release(self, unit: str) -> None:
        """Let this unit's updates go on."""
        self._saved[unit].set()

    def release_all(self) -> None:
        """Let all updates go on."""
        for saved in self._saved.values():
            saved.set()

    def wait(self, unit: str, step: int) -> None:
        """Return when the unit may have its update of ``step``."""
        saved = self._saved.get(unit)
        if saved is not None and step > self._step and not saved.is_set():
            started = time.perf_counter()
            saved.wait()
            self.waited_s += time.perf_counter() - started
