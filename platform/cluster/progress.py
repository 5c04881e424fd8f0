"""Following a file of JSON lines that another process writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class LineTail:
    """Reads what was added to a file since the last call.

    Lines are split on the byte 0x0A alone: text mode and ``splitlines`` also split on characters that JSON strings may
    hold. A line without its end yet is left for the next call.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def records(self) -> Iterator[dict[str, Any]]:
        """The new complete records; none when the file is not there yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return
        self._offset += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        for line in lines:
            if line:
                yield json.loads(line)
