"""One step in a while is recorded, operation by operation, so that it can be drawn beside what was predicted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..executor import Streamed
from ..run_directory import write_atomically
from ..timeline import Timeline

FIRST, EVERY = 3, 200
"""The steps of a process that are recorded: this one, past the slow first ones, and then every so many."""
_MOST_SPANS = 8_000
"""A step of more operations is not kept: nobody could read it, and the file would be large."""


class Tracing:
    """Records steps into ``timeline.json`` of the run's directory."""

    def __init__(self, streamed: Streamed, path: Path) -> None:
        self._streamed, self._path = streamed, path
        self._taken = 0

    def begin(self) -> None:
        """A step begins."""
        self._taken += 1
        if self._recorded:
            self._streamed.trace()

    def end(self, step: int, stalls: Mapping[str, float]) -> None:
        """Step ``step`` has ended; ``stalls`` are its seconds of waiting for each link (``stall_h2d_s`` and so on)."""
        if not self._recorded:
            return
        timeline = self._streamed.timeline()
        self._streamed.trace(False)
        if len(timeline.spans) <= _MOST_SPANS:
            _save(self._path, step, timeline, stalls)

    @property
    def _recorded(self) -> bool:
        return self._taken % EVERY == FIRST


def _save(path: Path, step: int, timeline: Timeline, stalls: Mapping[str, float]) -> None:
    # What began before the step belongs to the one before.
    timeline.spans = [span for span in timeline.spans if span.start_s >= 0]
    timeline.exposed_s = {name.removeprefix("stall_").removesuffix("_s"): value for name, value in stalls.items()}
    values = {"step": step, **timeline.to_dict()}
    write_atomically(path, json.dumps(values, allow_nan=False))
