"""Rows of a file, one by one, each with its line: JSON lines, a JSON array, either gzipped, and parquet.

The kind of file is told from its content, not from its name. Nothing is cached, so a changed file is read as it is now.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]

from ..errors import DataError
from .canonical import Refused

_SNIFF = 4096
_BLOCK = 1 << 20
_BLANK = b" \t\r\n"
_SPACE = " \t\r\n"
_OTHER_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}

Row = dict[str, Any] | Refused
"""A row's keys and values, or why there is none in that line."""


def read_rows(path: str | Path) -> Iterator[tuple[int, Row]]:
    """Yield ``(line, row)``, lines from 1 (for parquet, the row's number).

    A line that is no JSON object comes as Refused. Raises DataError when the file as a whole cannot be read: missing, a
    folder, a pipe, neither JSON nor parquet, another encoding than UTF-8, damaged.
    """
    path = Path(path)
    if path.is_fifo() or path.is_char_device() or path.is_socket():
        raise DataError(f"{path}: is no file on a disk, and can be read only once", hint="write it to a file first")
    try:
        with path.open("rb") as file:
            yield from _rows(file, path)
    except FileNotFoundError as error:
        hint = "relative paths in a job file start at its folder; a data set of the hub is hf://owner/name"
        raise DataError(f"{path}: no such data file", hint=hint) from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: is a folder", hint="name the files in it one by one") from error
    except (EOFError, zlib.error, OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: damaged or unreadable: {error}") from error


def _rows(file: BinaryIO, path: Path) -> Iterator[tuple[int, Row]]:
    if file.read(4) == b"PAR1":
        yield from _parquet(path)
        return
    with _plain(file) as text:
        start = text.read(_SNIFF)
        _check_encoding(start, path)
        text.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
        if start.removeprefix(codecs.BOM_UTF8).lstrip(_BLANK).startswith(b"["):
            yield from _array(text, path)
        else:
            yield from _lines(text)


@contextmanager
def _plain(file: BinaryIO) -> Iterator[BinaryIO]:
    """The content without gzip, from its start."""
    file.seek(0)
    zipped = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    if not zipped:
        yield file
        return
    with gzip.GzipFile(fileobj=file) as content:
        yield cast(BinaryIO, content)


def _check_encoding(start: bytes, path: Path) -> None:
    for mark, name in _OTHER_ENCODINGS.items():
        if start.startswith(mark):
            raise DataError(f"{path}: the encoding is {name}", hint="save the file as UTF-8")
    if b"\0" in start:
        raise DataError(f"{path}: binary, neither JSON in UTF-8 nor parquet")


def _lines(text: BinaryIO) -> Iterator[tuple[int, Row]]:
    """Lines end at byte 0x0A only: U+2028 and its like are part of a string."""
    for number, line in enumerate(text, start=1):
        if line.strip(_BLANK):
            yield number, _object(line)


def _object(line: bytes) -> Row:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        return Refused("not UTF-8")
    except (ValueError, RecursionError):
        return Refused("not valid JSON")
    return _as_row(value)


def _as_row(value: Any) -> Row:
    return value if isinstance(value, dict) else Refused("not a JSON object")


def _array(file: BinaryIO, path: Path) -> Iterator[tuple[int, Row]]:
    """Items of an array, read block by block: a file of any size is in memory one row at a time."""
    text = _Text(file, path)
    text.skip(_SPACE)
    text.at += 1
    while True:
        text.skip(", " + _SPACE)
        if text.buffer.startswith("]", text.at):
            text.at += 1
            if not text.skip(_SPACE):
                raise DataError(f"{path}:{text.line}: there is more after the array")
            return
        line = text.line
        yield line, _as_row(text.value())


class _Text:
    """A window on the text of a file, from ``at`` on."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.buffer, self.at, self.line = "", 0, 1
        self._file, self._path = file, path
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._ended = False

    def skip(self, characters: str) -> bool:
        """Move to the next other character; true if there is none."""
        while True:
            while self.at < len(self.buffer) and self.buffer[self.at] in characters:
                self.line += self.buffer[self.at] == "\n"
                self.at += 1
            if self.at < len(self.buffer) or not self._more(_BLOCK):
                return self.at >= len(self.buffer)

    def value(self) -> Any:
        """The JSON value that begins here. Raises DataError when there is none."""
        size = _BLOCK
        while True:
            try:
                value, end = self._json.raw_decode(self.buffer, self.at)
                if end < len(self.buffer) or self._ended:
                    self.line += self.buffer.count("\n", self.at, end)
                    self.at = end
                    return value
            except (ValueError, RecursionError) as error:
                if self._ended:
                    raise DataError(f"{self._path}:{self.line}: not valid JSON from here on: {error}") from error
            self._more(size)
            size *= 2

    def _more(self, size: int) -> bool:
        block = self._file.read(size)
        self._ended = not block
        try:
            text = self._utf8.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            known = self.line + self.buffer.count("\n", self.at)
            line = known + error.object[: error.start].count(b"\n")
            raise DataError(f"{self._path}:{line}: not UTF-8", hint="save the file as UTF-8") from error
        self.buffer, self.at = self.buffer[self.at :] + text, 0
        return not self._ended


def _parquet(path: Path) -> Iterator[tuple[int, Row]]:
    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, _as_row(_without_nulls(row))


def _without_nulls(value: Any) -> Any:
    """Without the keys that a column's common type gives to rows that lack them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
