"""How long the controller's steps take, for those who watch it: a histogram in a small file, written now and then.

The API is another process, and a database write for each step would cost more than it tells.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..artifacts import write_json

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_EVERY_S = 5.0


@dataclass
class StepTimes:
    """Counts steps by their duration since this process began."""

    path: Path
    clock: Callable[[], float] = time.monotonic
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """Steps of at most each of the bounds and more than the one before; the last, steps beyond all of them."""
    total_s: float = 0.0
    _written_at: float = float("-inf")

    def add(self, seconds: float) -> None:
        """A step was taken; the file follows within a few seconds."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds
        if self.clock() - self._written_at >= _EVERY_S:
            self._written_at = self.clock()
            record = {"bounds_s": list(BOUNDS_S), "counts": self.counts, "total_s": self.total_s}
            with contextlib.suppress(OSError):  # a full disk is no reason to lead no more
                write_json(self.path, record, durable=False)
