"""Where tokenized rows are: in memory, or in an Arrow file that is mapped and never read whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow  # type: ignore[import-untyped]

from ..errors import DataError
from .cache import prune, used
from .template_spans import Span

Tokens = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]
_ROWS, _REPORT = "rows.arrow", "report.json"
_SCHEMA = pyarrow.schema(
    [
        ("input_ids", pyarrow.list_(pyarrow.int32())),
        ("spans", pyarrow.list_(pyarrow.int32())),
        ("prompt", pyarrow.string()),
        ("answer", pyarrow.string()),
        ("source", pyarrow.int32()),
    ]
)


class Store(Protocol):
    """Rows by number."""

    def tokens(self, row: int) -> Tokens:
        """Token ids."""

    def spans(self, row: int) -> list[Span]:
        """Ranges of tokens that carry the loss."""

    def prompt(self, row: int) -> str:
        """Rendered prompt of the last answer."""

    def answer(self, row: int) -> str:
        """Last answer, as the data has it."""

    @property
    def lengths(self) -> Counts:
        """Tokens of each row."""

    @property
    def sources(self) -> Counts:
        """Source of each row, as an index into the files of data.train, then of data.eval."""


@dataclass
class ListStore:
    """Rows in lists."""

    _tokens: list[Tokens] = field(default_factory=list)
    _spans: list[list[Span]] = field(default_factory=list)
    _prompts: list[str] = field(default_factory=list)
    _answers: list[str] = field(default_factory=list)

    def append(self, tokens: Sequence[int] | Tokens, spans: Sequence[Span], prompt: str, answer: str) -> None:
        """Add a row."""
        self._tokens.append(np.asarray(tokens, dtype=np.int32))
        self._spans.append(list(spans))
        self._prompts.append(prompt)
        self._answers.append(answer)

    def tokens(self, row: int) -> Tokens:
        return self._tokens[row]

    def spans(self, row: int) -> list[Span]:
        return self._spans[row]

    def prompt(self, row: int) -> str:
        return self._prompts[row]

    def answer(self, row: int) -> str:
        return self._answers[row]

    @property
    def lengths(self) -> Counts:
        return np.fromiter(map(len, self._tokens), np.int64, len(self._tokens))

    @property
    def sources(self) -> Counts:
        return np.zeros(len(self._tokens), np.int64)


class ArrowStore:
    """Rows of a mapped Arrow file. Raises DataError when the file is damaged."""

    def __init__(self, folder: Path) -> None:
        try:
            with pyarrow.memory_map(str(folder / _ROWS)) as file:
                reader = pyarrow.ipc.open_file(file)
                self._batches = [_Batch(reader.get_batch(at)) for at in range(reader.num_record_batches)]
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{folder}: damaged tokenized rows: {error}", hint="delete this folder") from error
        self._ends = list(np.cumsum([len(batch.lengths) for batch in self._batches], dtype=np.int64))

    def tokens(self, row: int) -> Tokens:
        batch, at = self._at(row)
        return batch.tokens(at)

    def spans(self, row: int) -> list[Span]:
        batch, at = self._at(row)
        return batch.spans(at)

    def prompt(self, row: int) -> str:
        batch, at = self._at(row)
        return str(batch.prompt[at].as_py())

    def answer(self, row: int) -> str:
        batch, at = self._at(row)
        return str(batch.answer[at].as_py())

    @property
    def lengths(self) -> Counts:
        return np.concatenate([np.zeros(0, np.int64), *(batch.lengths for batch in self._batches)])

    @property
    def sources(self) -> Counts:
        return np.concatenate([np.zeros(0, np.int64), *(batch.sources for batch in self._batches)])

    def _at(self, row: int) -> tuple[_Batch, int]:
        number = bisect_right(self._ends, row)
        return self._batches[number], row - (int(self._ends[number - 1]) if number else 0)


class _Batch:
    """One record batch; numbers are views of the mapped file."""

    def __init__(self, batch: Any) -> None:
        self._ids, self._id_edges = _flat(batch.column("input_ids"))
        self._spans, self._span_edges = _flat(batch.column("spans"))
        self.prompt, self.answer = batch.column("prompt"), batch.column("answer")
        self.sources: Counts = batch.column("source").to_numpy().astype(np.int64)
        self.lengths: Counts = np.diff(self._id_edges).astype(np.int64)

    def tokens(self, at: int) -> Tokens:
        part: Tokens = self._ids[self._id_edges[at] : self._id_edges[at + 1]]
        return part

    def spans(self, at: int) -> list[Span]:
        edges = self._spans[self._span_edges[at] : self._span_edges[at + 1]].tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))


def _flat(column: Any) -> tuple[Any, Any]:
    return column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy(zero_copy_only=True)


class Writer:
    """Writes rows to an Arrow file, chunk by chunk."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(
        self,
        ids: Sequence[Sequence[int]],
        spans: Sequence[Sequence[Span]],
        texts: Sequence[tuple[str, str]],
        source: int,
    ) -> None:
        """Add rows of one source; ``texts`` are prompts and answers."""
        if not ids:
            return
        edges = [list(chain.from_iterable(row)) for row in spans]
        columns = [
            _ragged(ids),
            _ragged(edges),
            pyarrow.array([prompt for prompt, _ in texts], pyarrow.string()),
            pyarrow.array([answer for _, answer in texts], pyarrow.string()),
            pyarrow.array(np.full(len(ids), source, np.int32)),
        ]
        self._file.write_batch(pyarrow.record_batch(columns, schema=_SCHEMA))


def _ragged(rows: Sequence[Sequence[int]]) -> Any:
    edges = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=edges[1:])
    values = np.fromiter(chain.from_iterable(rows), np.int32, int(edges[-1]))
    return pyarrow.ListArray.from_arrays(pyarrow.array(edges), pyarrow.array(values))


Fill = Callable[[Writer], dict[str, Any]]
"""Writes all rows and gives the report as JSON values."""


def stored(cache: Path | None, key: str, fill: Fill) -> tuple[ArrowStore, dict[str, Any]]:
    """The rows under ``key`` in the folder ``cache``, written by ``fill`` unless they are there.

    Without a folder the file is a temporary one that goes with the mapping. A folder in the cache is complete: it is
    renamed into place when its last byte is on the disk. Raises DataError when the folder cannot be written.
    """
    try:
        if cache is None:
            with tempfile.TemporaryDirectory(prefix="lazytrain-rows-") as name:
                return _write(Path(name), fill)
        folder = cache / key
        if not (folder / _REPORT).exists():
            cache.mkdir(parents=True, exist_ok=True)
            with _beside(folder) as temporary:
                _write(temporary, fill)
                _place(temporary, folder)
            prune(cache)
        used(folder)
        return ArrowStore(folder), _report(folder)
    except OSError as error:
        raise DataError(
            f"cannot keep tokenized rows in {cache or tempfile.gettempdir()}: {error}", hint="set data.cache"
        ) from error


def _write(folder: Path, fill: Fill) -> tuple[ArrowStore, dict[str, Any]]:
    with (folder / _ROWS).open("wb") as raw:
        with pyarrow.ipc.new_file(raw, _SCHEMA) as file:
            report = fill(Writer(file))
        raw.flush()
        os.fsync(raw.fileno())
    with (folder / _REPORT).open("w", encoding="utf-8") as file:
        json.dump(report, file)
        file.flush()
        os.fsync(file.fileno())
    return ArrowStore(folder), report


def _report(folder: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads((folder / _REPORT).read_bytes())
    except ValueError as error:
        raise DataError(f"{folder}: damaged report of tokenized rows: {error}", hint="delete this folder") from error
    return values


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _place(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / _REPORT).exists():  # else another process was faster, with the same rows
            raise
