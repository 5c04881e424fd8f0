"""Tokenized rows, and their batches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

IGNORED = -100
"""Label of a position that carries no loss."""


@dataclass
class Rows:
    """Usable rows, each a list entry at the same index everywhere."""

    input_ids: list[list[int]] = field(default_factory=list)
    answer_starts: list[int] = field(default_factory=list)
    """Position from which a row's tokens carry the loss; at least 1."""
    prompts: list[str] = field(default_factory=list)
    """Rendered prompt with which generation starts."""
    answers: list[str] = field(default_factory=list)
    """Answer as the data has it."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def append(self, input_ids: list[int], answer_start: int, prompt: str, answer: str) -> None:
        """Add a row."""
        self.input_ids.append(input_ids)
        self.answer_starts.append(answer_start)
        self.prompts.append(prompt)
        self.answers.append(answer)

    def take(self, indices: Sequence[int]) -> Rows:
        """The rows at these indices, in this order."""
        return Rows(
            [self.input_ids[i] for i in indices],
            [self.answer_starts[i] for i in indices],
            [self.prompts[i] for i in indices],
            [self.answers[i] for i in indices],
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded on the right to the longest; tensors are (rows, longest) int64, labels are unshifted."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    tokens: int
    """Tokens that are no padding."""
    supervised: int
    """Tokens that carry the loss."""


def batches(
    rows: Rows, *, batch: int, seed: int, epoch: int, pad_id: int, drop_last: bool = False, skip: int = 0
) -> Iterator[Batch]:
    """All rows of an epoch in batches; their order depends on ``seed``, ``epoch`` and ``len(rows)`` alone.

    ``skip`` leaves out the first batches, for a run that goes on within an epoch; ``drop_last`` a smaller last one.
    """
    order = list(range(len(rows)))
    random.Random(f"{seed}/{epoch}/{len(rows)}").shuffle(order)
    for start in range(skip * batch, len(order), batch):
        indices = order[start : start + batch]
        if len(indices) == batch or not drop_last:
            yield collate(rows, indices, pad_id)


def worst_batch(rows: Rows, batch: int) -> Batch:
    """The longest rows, repeated if there are fewer than ``batch``: what any batch of an epoch needs at most."""
    if not len(rows):
        raise ValueError("there are no rows to take a batch of")
    longest = sorted(range(len(rows)), key=lambda i: -len(rows.input_ids[i]))[:batch]
    return collate(rows, [longest[i % len(longest)] for i in range(batch)], pad_id=0)


def collate(rows: Rows, indices: Sequence[int], pad_id: int) -> Batch:
    """Pad the rows at ``indices``. Padding is told by position: ``pad_id`` may be a token that also occurs in rows."""
    width = max(len(rows.input_ids[i]) for i in indices)
    input_ids = torch.full((len(indices), width), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORED)
    for place, i in enumerate(indices):
        ids, start = torch.tensor(rows.input_ids[i]), rows.answer_starts[i]
        input_ids[place, : len(ids)] = ids
        attention_mask[place, : len(ids)] = 1
        labels[place, start : len(ids)] = ids[start:]
    return Batch(input_ids, attention_mask, labels, int(attention_mask.sum()), int((labels != IGNORED).sum()))


def pad_id(tokenizer: object) -> int:
    """The tokenizer's padding id, else its end-of-sequence id, else 0."""
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if value is not None:
            return int(value)
    return 0
