"""A job's metrics by name, thinned: read once and then only what was added, so that many open pages cost little."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...schedulers.drawing import thin
from ..artifacts import read_rows
from ..schemas import SeriesAnswer, SeriesView

_MOST_VALUES = 8_000_000
"""Values that are kept of all logs together: 128 MiB with their steps."""
_MOST_NAMES = 200
_CHUNK_BYTES = 4 << 20
_RESERVED = {"step", "time"}
_HUGE = 1.7e308
"""Nothing finite is beyond it, and a NaN is neither below nor above it."""
_NAN = float("nan")


@dataclass
class _Log:
    """What was read of one metric log; a log that is another file now, or shorter, is read anew."""

    path: Path
    file: tuple[int, int] = (0, 0)
    offset: int = 0
    steps: dict[str, array[int]] = field(default_factory=dict)
    values: dict[str, array[float]] = field(default_factory=dict)
    thinned: dict[tuple[str, int], SeriesView] = field(default_factory=dict)
    alone: threading.Lock = field(default_factory=threading.Lock)

    def read_on(self) -> None:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return
        if (status.st_dev, status.st_ino) != self.file or status.st_size < self.offset:
            self.file, self.offset = (status.st_dev, status.st_ino), 0
            self.steps, self.values, self.thinned = {}, {}, {}
        while self.offset < status.st_size:
            rows, offset = read_rows(self.path, offset=self.offset, limit_bytes=_CHUNK_BYTES)
            if offset == self.offset:
                return  # half a line, or one that is longer than any of ours
            self.offset, self.thinned = offset, {}
            for row in rows:
                self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        step = row.get("step")
        if not isinstance(step, int) or not 0 <= step < 2**62:
            return
        for name, value in row.items():
            if name in _RESERVED or not isinstance(value, (int, float, type(None))):
                continue
            if name not in self.steps:
                if len(self.steps) >= _MOST_NAMES:
                    continue
                self.steps[name], self.values[name] = array("q"), array("d")
            self.steps[name].append(step)
            finite = float(value) if value is not None and -_HUGE <= value <= _HUGE else _NAN
            self.values[name].append(finite)

    def view(self, name: str, points: int) -> SeriesView:
        key = (name, points)
        if key not in self.thinned:
            steps, values = self.steps[name], self.values[name]
            finite = [value if value == value else None for value in values]
            chosen = thin(finite, points)
            self.thinned[key] = SeriesView(
                steps=[steps[k] for k in chosen], values=[finite[k] for k in chosen], count=len(values)
            )
        return self.thinned[key]

    def __len__(self) -> int:
        """Values that are kept."""
        return sum(map(len, self.values.values()))


class SeriesReader:
    """Reads metric logs for many threads; keeps the values of the jobs that were asked for last."""

    def __init__(self) -> None:
        self._logs: OrderedDict[Path, _Log] = OrderedDict()
        self._alone = threading.Lock()

    def read(self, path: Path, names: Iterable[str], points: int) -> SeriesAnswer:
        """The metrics of these names that the log holds, each thinned to about ``points`` points."""
        log = self._log(path)
        with log.alone:
            log.read_on()
            found = {name: log.view(name, points) for name in names if name in log.steps}
        self._make_room()
        return SeriesAnswer(series=found)

    def _log(self, path: Path) -> _Log:
        with self._alone:
            log = self._logs.setdefault(path, _Log(path))
            self._logs.move_to_end(path)
            return log

    def _make_room(self) -> None:
        with self._alone:
            kept = sum(map(len, self._logs.values()))
            while kept > _MOST_VALUES and len(self._logs) > 1:
                kept -= len(self._logs.popitem(last=False)[1])
