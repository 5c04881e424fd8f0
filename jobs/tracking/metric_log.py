"""The local metric log: one JSON object a line, appended, never rewritten.

    {"step": 12, "time": 1790000000.25, "loss": 0.53, "grad_norm": null, "nonfinite/grad_norm": 1}

``time`` is Unix time in seconds. A value that is infinite or not a number is null, and is counted beside it. Each
metric has each step once: a resumed run that reports the steps since its checkpoint again adds nothing. A line that
was cut off by a kill or a power loss is skipped by readers and removed by the next writer.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NON_FINITE = "nonfinite/"
_RESERVED = ("step", "time")
_TAIL_BYTES = 1 << 16

Row = dict[str, Any]


class MetricLog:
    """Appends to one log file; made anew or continued."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._highest: dict[str, int] = {}
        self._non_finite: dict[str, int] = {}
        for row, _ in read_from(self.path, 0):
            self._learn(row)
        self._file = self.path.open("ab", buffering=0)
        _remove_torn_line(self.path)

    def append(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Write the metrics that this step does not have yet; False when there are none.

        When it returns, the operating system has the line: a kill of this process cannot lose it.
        """
        if taken := [name for name in metrics if name in _RESERVED or name.startswith(NON_FINITE)]:
            raise ValueError(f"metric names {taken} are taken by the log itself")
        values = {name: float(value) for name, value in metrics.items() if step > self._highest.get(name, -1)}
        if not values:
            return False
        row: Row = {"step": step, "time": time.time()}
        for name, value in values.items():
            row[name] = value if math.isfinite(value) else None
            if row[name] is None:
                row[NON_FINITE + name] = self._non_finite.get(name, 0) + 1
        self._write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._learn(row)
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _learn(self, row: Row) -> None:
        for name, value in row.items():
            if name.startswith(NON_FINITE):
                self._non_finite[name.removeprefix(NON_FINITE)] = value
            elif name not in _RESERVED:
                self._highest[name] = max(row["step"], self._highest.get(name, -1))

    def _write(self, line: bytes) -> None:
        """One write for one line, so that a reader hardly ever sees half of one."""
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]


def read_metrics(path: str | os.PathLike[str]) -> list[Row]:
    """All complete rows of a log, in order; an absent log has none."""
    return [row for row, _ in read_from(Path(path), 0)]


def read_from(path: Path, offset: int) -> Iterator[tuple[Row, int]]:
    """Complete rows from a byte offset on, each with the offset behind it; damaged lines are passed over."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            row = _parsed(line)
            if row is not None:
                yield row, offset


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) and "time" in row else None


def _remove_torn_line(path: Path) -> None:
    """A line is short, the log of a long run is not: looked for from its end."""
    with path.open("rb") as file:
        size = at = file.seek(0, os.SEEK_END)
        whole = 0
        while at and not whole:
            at = file.seek(max(0, at - _TAIL_BYTES))
            newline = file.read(_TAIL_BYTES).rfind(b"\n")
            whole = at + newline + 1 if newline >= 0 else 0
    if whole < size:
        os.truncate(path, whole)
