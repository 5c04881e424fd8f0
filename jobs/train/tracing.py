"""A few steps in a while are recorded, operation by operation: to be drawn, and to calibrate what is predicted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..executor import Streamed
from ..run_directory import RunDirectory, write_atomically
from ..timeline import Timeline

FIRST, EVERY, IN_TURN = 3, 200, 3
"""Of every so many steps of a process, so many in turn are recorded from this one on, past the slow first ones."""
_MOST_SPANS = 8_000
"""A step of more operations is not kept: nobody could read it, and the file would be large."""


class Tracing:
    """Records the first of these steps into the run's ``timeline.json``, all of them into its ``steps.json``."""

    def __init__(self, streamed: Streamed, directory: RunDirectory) -> None:
        self._streamed, self._directory = streamed, directory
        self._taken = 0
        self._recorded: list[Timeline] = []

    def begin(self) -> None:
        """A step begins."""
        self._taken += 1
        if self._place >= 0:
            self._streamed.trace()

    def end(self, step: int, stalls: Mapping[str, float]) -> None:
        """Step ``step`` has ended; ``stalls`` are its seconds of waiting for each link (``stall_h2d_s`` and so on)."""
        if self._place < 0:
            return
        timeline = self._streamed.timeline()
        self._streamed.trace(False)
        if len(timeline.spans) > _MOST_SPANS:
            return
        _tidy(timeline, stalls)
        if self._place == 0:
            self._recorded.clear()
            _write(self._directory.timeline, {"step": step, **timeline.to_dict()})
        self._recorded.append(timeline)
        if self._place == IN_TURN - 1:
            _write(self._directory.steps, {"step": step, "steps": [each.to_dict() for each in self._recorded]})

    def forget(self) -> None:
        """Another policy is carried out from now on: its steps are not those of the one before."""
        self._recorded.clear()

    @property
    def _place(self) -> int:
        """The step's place among those that are recorded in turn, from 0; -1 for any other."""
        place = self._taken % EVERY - FIRST
        return place if 0 <= place < IN_TURN else -1


def _tidy(timeline: Timeline, stalls: Mapping[str, float]) -> None:
    # What began before the step belongs to the one before.
    timeline.spans = [span for span in timeline.spans if span.start_s >= 0]
    timeline.exposed_s = {name.removeprefix("stall_").removesuffix("_s"): value for name, value in stalls.items()}


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(values, allow_nan=False))
