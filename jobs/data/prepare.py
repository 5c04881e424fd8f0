"""From the section ``data`` of a job file to tokenized rows for training and evaluation."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..frozen import digest
from ..spec import Data, Split
from .canonical import Refused, SystemRefused
from .formats import Converted, detect, to_conversation
from .preferences import Pair
from .render import Rendered, Rendering, renderer
from .report import Report
from .rows import Rows
from .sources import Input, inputs
from .store import Counts, Writer, stored
from .templates import choose_template
from .tokens import Encoded, Limit, encode, tokenized

_SCHEMA = 2
"""Goes up when the same input would become other tokens."""
_CHUNK_ROWS = 1000
_CHUNK_CHARACTERS = 1 << 22
_PAIRS = "preference"
_AFTERWARDS = {"split", "packing", "cache"}
"""Options that do not change what a row becomes."""


Group = tuple[int, tuple[Rendered, ...]]
"""A line of a file with the sequences that its row becomes: one, or the two of a pair."""


@dataclass
class Prepared:
    """Rows to train on, rows to evaluate on, and what became of the files."""

    train: Rows
    eval: Rows
    report: Report

    @property
    def together(self) -> int:
        """Sequences of `train` and `eval` that belong together: two of a preference pair, else one."""
        return 2 if self.report.pairs else 1


def prepare(data: Data, tokenizer: Any, *, cache: str | Path | None = None) -> Prepared:
    """Read, render, tokenize and split.

    Tokenized rows are kept in ``data.cache``, else in the folder ``cache``, else in a temporary file; they are mapped,
    not loaded. ``data.chat_template`` becomes the tokenizer's. Rows that cannot be used are counted in the report.
    Raises DataError when a file cannot be read or no row is usable (with the table of refusals), ModelError for a
    tokenizer without offsets, end token or the template that the rows need.
    """
    choose_template(tokenizer, data.chat_template)
    loader = _Loader(data, tokenizer)
    folder = data.cache or cache
    store, values = stored(Path(folder) if folder else None, loader.key, loader.fill)
    report = Report.from_dict(values)
    report.fingerprint, report.cache_key = loader.fingerprint, loader.key
    rows = Rows(store, fingerprint=loader.fingerprint)
    of_train = np.flatnonzero(rows.sources < len(data.train))
    train, held_out = rows.take(of_train), rows.take(np.flatnonzero(rows.sources >= len(data.train)))
    together = 2 if report.pairs else 1
    if data.split is not None:
        train, held_out = _split(train, data.split, together)
    train = _weighted(train, data, together)
    report.train_rows, report.eval_rows = len(train) // together, len(held_out) // together
    return Prepared(train, held_out, report)


class _Loader:
    """Reads files and counts what becomes of their rows."""

    def __init__(self, data: Data, tokenizer: Any) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._render = renderer(tokenizer, Rendering(data.system_policy, data.supervise_generation_prompt))
        self._limit = Limit.of(tokenizer, data.max_length)
        sources = (*data.train, *data.eval)
        self._inputs = [one for index, source in enumerate(sources) for one in inputs(source, index)]
        content = _content(data, tokenizer, self._inputs)
        self.key = digest(content, [one.label for one in self._inputs])
        """Under which tokenized rows are kept: their content, and the names that reports show."""
        weights = [source.weight for source in data.train]
        self.fingerprint = digest(content, data.split and data.split.model_dump(mode="json"), weights)

    def fill(self, writer: Writer) -> dict[str, Any]:
        """Write all rows. Raises DataError when a part has none."""
        report = Report()
        for first, sources in ((0, self._data.train), (len(self._data.train), self._data.eval)):
            part = [one for one in self._inputs if first <= one.source < first + len(sources)]
            usable = sum(self._load(one, writer, report) for one in part)
            if part and not usable:
                files = ", ".join(one.label for one in part)
                raise DataError(f"no usable row in {files}\n{report.table() or '       0  rows in the file'}")
        report.pairs = _PAIRS in report.formats.values()
        if report.pairs and set(report.formats.values()) != {_PAIRS}:
            raise DataError(
                f"preference pairs and other rows are mixed: {report.formats}", hint="train on one kind at a time"
            )
        if report.system_refused:
            raise DataError(
                f"the chat template refuses system turns\n{report.table()}",
                hint="set data.system_policy to fold, or remove these turns",
            )
        return report.to_dict()

    def _load(self, one: Input, writer: Writer, report: Report) -> int:
        """Tokenize in a thread while the next chunk is read and rendered; both happen in the order of the file."""
        usable, waiting = 0, None
        with ThreadPoolExecutor(1) as thread:
            for chunk in self._chunks(one, report):
                texts = [rendered for _, group in chunk for rendered in group]
                encodings = thread.submit(tokenized, self._tokenizer, texts, self._limit)
                if waiting is not None:
                    usable += self._add(one, *waiting, writer, report)
                waiting = chunk, encodings
            if waiting is not None:
                usable += self._add(one, *waiting, writer, report)
        return usable

    def _chunks(self, one: Input, report: Report) -> Iterator[list[Group]]:
        chunk: list[Group] = []
        characters = 0
        for line, group in self._rendered(one, report):
            chunk.append((line, group))
            characters += sum(len(rendered.text) for rendered in group)
            if len(chunk) == _CHUNK_ROWS or characters >= _CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        if chunk:
            yield chunk

    def _rendered(self, one: Input, report: Report) -> Iterator[Group]:
        """Usable rows of one file with their lines; the others go into the report."""
        for line, converted in self._conversations(one, report):
            row = (converted.chosen, converted.rejected) if isinstance(converted, Pair) else (converted,)
            try:
                group = tuple(self._render(conversation) for conversation in row)
            except Refused as refused:
                report.system_refused += isinstance(refused, SystemRefused)
                report.refuse(one.label, line, refused.rule)
                continue
            report.context_turns += sum(rendered.context_turns for rendered in group)
            yield line, group

    def _conversations(self, one: Input, report: Report) -> Iterator[tuple[int, Converted]]:
        known: str | None = None if one.format == "auto" else one.format
        for line, row in one.rows():
            report.rows += 1
            try:
                if isinstance(row, Refused):
                    raise row
                name = known or detect(row)
                conversation = to_conversation(row, name)
            except Refused as refused:
                report.refuse(one.label, line, refused.rule)
                continue
            known = report.formats[one.label] = name
            yield line, conversation

    def _add(
        self,
        one: Input,
        chunk: Sequence[Group],
        encodings: Future[list[Any]],
        writer: Writer,
        report: Report,
    ) -> int:
        limit = self._data.max_length
        rows = [rendered for _, group in chunk for rendered in group]
        tokens = iter(encode(self._tokenizer, rows, encodings.result(), self._limit))
        kept: list[tuple[Rendered, Encoded]] = []
        for line, group in chunk:
            encoded = [(rendered, next(tokens)) for rendered in group]
            if all(row.supervised for _, row in encoded):
                kept += encoded
                for _, row in encoded:
                    report.count(len(row.ids), row.supervised, truncated=row.truncated)
            else:
                report.refuse(one.label, line, f"nothing of the answer is within max_length {limit}")
        writer.write(
            [row.ids for _, row in kept],
            [row.spans for _, row in kept],
            [(rendered.prompt, rendered.answer) for rendered, _ in kept],
            one.source,
        )
        return len(kept)


def _split(rows: Rows, split: Split, together: int) -> tuple[Rows, Rows]:
    """Both parts keep the order of the files; a share above 0 gets at least one row where there are two."""
    count = len(rows) // together
    order = list(range(count))
    random.Random(f"{split.seed}/{count}").shuffle(order)
    held_out = round(split.eval * count)
    if split.eval > 0 and count > 1:
        held_out = min(max(held_out, 1), count - 1)
    trained = min(max(round(split.train * count), 1), count - held_out)
    parts = sorted(order[held_out : held_out + trained]), sorted(order[:held_out])
    train, evaluated = (rows.take(_spread_out(np.asarray(part, np.int64), together)) for part in parts)
    return train, evaluated


def _spread_out(groups: Counts, together: int) -> Counts:
    """Rows of these groups, those of one group beside each other."""
    spread: Counts = (groups[:, None] * together + np.arange(together)).reshape(-1)
    return spread


def _weighted(rows: Rows, data: Data, together: int) -> Rows:
    """Every row as many times as its source's weight says, the fraction drawn."""
    if all(source.weight == 1 for source in data.train):
        return rows
    chosen: list[Counts] = []
    sources = rows.sources[::together]
    for number, source in enumerate(data.train):
        own = np.flatnonzero(sources == number)
        whole, wanted = int(source.weight), round(source.weight * len(own))
        drawn = random.Random(f"{number}/{len(own)}").sample(own.tolist(), min(len(own), wanted - whole * len(own)))
        chosen += [own] * whole + [np.asarray(sorted(drawn), np.int64)]
    return rows.take(_spread_out(np.concatenate(chosen), together))


def _content(data: Data, tokenizer: Any, files: Sequence[Input]) -> str:
    """Digest of all that decides which tokens the rows become."""
    without_names = {"__all__": {"path", "weight"}}
    options = data.model_dump(
        mode="json", exclude={**dict.fromkeys(_AFTERWARDS, True), "train": without_names, "eval": without_names}
    )
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
    for setting_of_a_call in ("padding", "truncation"):
        vocabulary.pop(setting_of_a_call, None)
    contents = [one.digest() for one in files]
    return digest(_SCHEMA, options, contents, vocabulary, tokenizer.chat_template, tokenizer.eos_token)
