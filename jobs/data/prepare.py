"""From the section ``data`` of a job file to tokenized rows for training and evaluation."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..frozen import digest
from ..spec import Data, Source, Split
from .canonical import Conversation, Refused
from .formats import check_format, detect, to_conversation
from .read import read_rows
from .render import Rendered, renderer
from .report import Report
from .rows import Rows
from .tokens import encode

_SCHEMA = 1
"""Goes up when the same input would become other tokens."""
_CHUNK = 1000


@dataclass
class Prepared:
    """Rows to train on, rows to evaluate on, and what became of the files."""

    train: Rows
    eval: Rows
    report: Report


def prepare(data: Data, tokenizer: Any) -> Prepared:
    """Read, render, tokenize and split.

    Rows that cannot be used are counted in the report. Raises DataError when a file cannot be read or no row is usable
    (with the table of refusals), InputError for a format that this version does not read, ModelError for a tokenizer
    without offsets or end token.
    """
    for source in (*data.train, *data.eval):
        check_format(source.format)
    loader = _Loader(data, tokenizer)
    report = loader.report
    train = loader.load(data.train)
    train, held_out = (train, loader.load(data.eval)) if data.split is None else _split(train, data.split)
    report.train_rows, report.eval_rows = len(train), len(held_out)
    return Prepared(train, held_out, report)


class _Loader:
    """Reads files and counts what becomes of their rows."""

    def __init__(self, data: Data, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._render = renderer(tokenizer)
        self._max_length = data.max_length
        self.report = Report(fingerprint=_fingerprint(data, tokenizer))

    def load(self, sources: Sequence[Source]) -> Rows:
        rows = Rows()
        for source in sources:
            conversations = self._conversations(source)
            while chunk := list(islice(conversations, _CHUNK)):
                self._add(rows, source.path, chunk)
        if sources and not len(rows):
            files = ", ".join(source.path for source in sources)
            raise DataError(f"no usable row in {files}\n{self.report.table() or '       0  rows in the file'}")
        return rows

    def _conversations(self, source: Source) -> Iterator[tuple[int, Conversation]]:
        """Usable rows of one file with their lines; the others go into the report."""
        known: str | None = None if source.format == "auto" else source.format
        for line, row in read_rows(source.path):
            self.report.rows += 1
            try:
                if isinstance(row, Refused):
                    raise row
                name = known or detect(row)
                conversation = to_conversation(row, name)
            except Refused as refused:
                self.report.refuse(source.path, line, refused.rule)
                continue
            known = self.report.formats[source.path] = name
            yield line, conversation

    def _add(self, rows: Rows, file: str, chunk: Sequence[tuple[int, Conversation]]) -> None:
        rendered: list[tuple[int, Conversation, Rendered]] = []
        for line, conversation in chunk:
            try:
                rendered.append((line, conversation, self._render(conversation)))
            except Refused as refused:
                self.report.refuse(file, line, refused.rule)
        encoded = encode(self._tokenizer, [text for _, _, text in rendered], self._max_length)
        for (line, conversation, text), tokens in zip(rendered, encoded, strict=True):
            if tokens.supervised:
                rows.append(tokens.ids, tokens.answer_start, text.prompt, conversation.answer)
                self.report.count(len(tokens.ids), tokens.supervised, truncated=tokens.truncated)
            else:
                self.report.refuse(file, line, f"nothing of the answer is within max_length {self._max_length}")


def _split(rows: Rows, split: Split) -> tuple[Rows, Rows]:
    """Both parts keep the order of the files; a share above 0 gets at least one row where there are two."""
    order = list(range(len(rows)))
    random.Random(f"{split.seed}/{len(rows)}").shuffle(order)
    held_out = round(split.eval * len(rows))
    if split.eval > 0 and len(rows) > 1:
        held_out = min(max(held_out, 1), len(rows) - 1)
    trained = min(max(round(split.train * len(rows)), 1), len(rows) - held_out)
    return rows.take(sorted(order[held_out : held_out + trained])), rows.take(sorted(order[:held_out]))


def _fingerprint(data: Data, tokenizer: Any) -> str:
    options = data.model_dump(mode="json", exclude={"train": {"__all__": {"path"}}, "eval": {"__all__": {"path"}}})
    files = [_hash(source.path) for source in (*data.train, *data.eval)]
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
    for setting_of_a_call in ("padding", "truncation"):
        vocabulary.pop(setting_of_a_call, None)
    return digest(_SCHEMA, options, files, vocabulary, tokenizer.chat_template, tokenizer.eos_token)


def _hash(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return _sha256(file)
    except OSError:
        return ""  # reading the rows will say what is wrong with the file


def _sha256(file: Any) -> str:
    sha = hashlib.sha256()
    while block := file.read(1 << 20):
        sha.update(block)
    return sha.hexdigest()
