"""Tokenized rows, and their order in an epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar, overload

import numpy as np
import torch

from .batch import IGNORED, Batch, padded
from .packing import packed
from .store import Counts, ListStore, Store, Tokens
from .template_spans import Span

T = TypeVar("T")
_WINDOW = 50
"""Batches among which rows of one length are gathered when lengths are bucketed."""


class Column(Sequence[T], Generic[T]):
    """One value of every row, read when asked for."""

    def __init__(self, size: int, read: Callable[[int], T]) -> None:
        self._size, self._read = size, read

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, slice):
            return [self._read(i) for i in range(*at.indices(self._size))]
        return self._read(range(self._size)[at])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # equal by content, like a list


class Rows:
    """Usable rows: a choice among those of a store. ``fingerprint`` changes with their content."""

    def __init__(self, store: Store | None = None, index: Counts | None = None, fingerprint: str = "") -> None:
        self._store: Store = ListStore() if store is None else store
        self._index = index
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._store.lengths) if self._index is None else len(self._index)

    @property
    def input_ids(self) -> Column[list[int]]:
        """Token ids of each row."""
        return Column(len(self), lambda row: self.tokens(row).tolist())

    @property
    def answer_starts(self) -> Column[int]:
        """First token of each row that carries the loss; at least 1."""
        return Column(len(self), lambda row: self.spans(row)[0][0])

    @property
    def prompts(self) -> Column[str]:
        """Rendered prompt with which generation of a row's last answer starts; empty for plain text."""
        return Column(len(self), lambda row: self._store.prompt(self._at(row)))

    @property
    def answers(self) -> Column[str]:
        """Last answer as the data has it."""
        return Column(len(self), lambda row: self._store.answer(self._at(row)))

    @property
    def lengths(self) -> Counts:
        """Tokens of each row."""
        lengths = self._store.lengths
        return lengths if self._index is None else lengths[self._index]

    @property
    def sources(self) -> Counts:
        """Source of each row."""
        sources = self._store.sources
        return sources if self._index is None else sources[self._index]

    @property
    def longest(self) -> int:
        """Tokens of the longest row; 0 without rows."""
        return int(self.lengths.max(initial=0))

    def tokens(self, row: int) -> Tokens:
        """Token ids of a row, as an array that may not be written to."""
        return self._store.tokens(self._at(row))

    def spans(self, row: int) -> list[Span]:
        """Ranges of a row's tokens that carry the loss, in order."""
        return self._store.spans(self._at(row))

    def append(self, input_ids: Sequence[int], answer: int | Sequence[Span], prompt: str, text: str) -> None:
        """Add a row to rows in memory; ``answer`` is where the loss starts, or the ranges that carry it."""
        if not isinstance(self._store, ListStore) or self._index is not None:
            raise TypeError("rows of a file, or a choice of rows, cannot grow")
        spans = [(answer, len(input_ids))] if isinstance(answer, int) else answer
        self._store.append(input_ids, spans, prompt, text)

    def take(self, indices: Sequence[int] | Counts) -> Rows:
        """The rows at these indices, in this order; nothing is copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Rows(self._store, chosen if self._index is None else self._index[chosen], self.fingerprint)

    def __reduce__(self) -> tuple[Callable[..., Rows], tuple[ListStore, str]]:
        """Pickled are the rows themselves, not the file they are in."""
        store = ListStore()
        for row in range(len(self)):
            store.append(self.tokens(row).copy(), self.spans(row), self.prompts[row], self.answers[row])
        return _rebuilt, (store, self.fingerprint)

    def _at(self, row: int) -> int:
        return row if self._index is None else int(self._index[row])


def _rebuilt(store: ListStore, fingerprint: str) -> Rows:
    return Rows(store, fingerprint=fingerprint)


def batches(
    rows: Rows,
    *,
    batch: int,
    seed: int,
    epoch: int,
    pad_id: int,
    drop_last: bool = False,
    skip: int = 0,
    buckets: bool = False,
    pack_length: int | None = None,
) -> Iterator[Batch]:
    """All rows of an epoch in batches; the order depends on ``seed``, ``epoch``, number and content of the rows alone.

    ``skip`` leaves out the first batches, for a run that goes on within an epoch; ``drop_last`` a smaller last one.
    ``buckets`` puts rows of similar length into one batch. ``pack_length`` puts the rows of a batch into as few
    sequences of at most so many tokens as first-fit finds; it changes neither which rows a batch has nor their order.
    """
    chosen = order(rows, batch=batch, seed=seed, epoch=epoch, buckets=buckets)
    for indices in chosen[skip:]:
        if len(indices) == batch or not drop_last:
            yield collate(rows, indices, pad_id, pack_length=pack_length)


def order(
    rows: Rows, *, batch: int, seed: int, epoch: int, buckets: bool = False, together: int = 1
) -> list[list[int]]:
    """Indices of the rows of every batch of an epoch, a smaller one last.

    ``together`` rows that follow each other (the two of a pair) stay so; ``batch`` is a multiple of it.
    """
    drawn = random.Random(f"{seed}/{epoch}/{len(rows)}{'/' if rows.fingerprint else ''}{rows.fingerprint}")
    indices = list(range(0, len(rows), together))
    drawn.shuffle(indices)
    groups = max(1, batch // together)
    if not buckets:
        return _grouped([indices[start : start + groups] for start in range(0, len(indices), groups)], together)
    lengths = rows.lengths.reshape(-1, together).max(axis=1)
    whole, rest = len(indices) - len(indices) % groups, []
    if whole < len(indices):
        rest = [indices[whole:]]
    gathered: list[list[int]] = []
    for start in range(0, whole, groups * _WINDOW):
        window = indices[start : min(start + groups * _WINDOW, whole)]
        window.sort(key=lambda row: int(lengths[row // together]))
        gathered += [window[at : at + groups] for at in range(0, len(window), groups)]
    drawn.shuffle(gathered)
    return _grouped(gathered + rest, together)


def _grouped(batches: list[list[int]], together: int) -> list[list[int]]:
    """Each index followed by the others of its group."""
    if together == 1:
        return batches
    return [[first + place for first in batch for place in range(together)] for batch in batches]


def worst_batch(rows: Rows, batch: int) -> Batch:
    """The longest rows, repeated if there are fewer than ``batch``: what any batch of an epoch needs at most."""
    if not len(rows):
        raise ValueError("there are no rows to take a batch of")
    longest = np.argsort(-rows.lengths, kind="stable")[:batch].tolist()
    return collate(rows, [longest[i % len(longest)] for i in range(batch)], pad_id=0)


def collate(rows: Rows, indices: Sequence[int], pad_id: int, *, pack_length: int | None = None) -> Batch:
    """The rows at ``indices``, each padded on the right, or packed into sequences of at most ``pack_length`` tokens.

    Padding is told by position: ``pad_id`` may be a token that also occurs in rows.
    """
    ids = [torch.from_numpy(rows.tokens(i).astype(np.int64)) for i in indices]
    labels = []
    for row, i in zip(ids, indices, strict=True):
        label = torch.full_like(row, IGNORED)
        for start, stop in rows.spans(i):
            label[start:stop] = row[start:stop]
        labels.append(label)
    batch = padded(ids, labels, pad_id) if pack_length is None else packed(ids, labels, pad_id, pack_length)
    return replace(batch, rows=tuple(indices))


def pad_id(tokenizer: object) -> int:
    """The tokenizer's padding id, else its end-of-sequence id, else 0."""
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if value is not None:
            return int(value)
    return 0
