"""Rows as the tensors of one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

IGNORED = -100
"""Label of a position that carries no loss."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences padded on the right to the longest; tensors are (sequences, longest) int64, labels are unshifted."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    """1 where a token stands, 0 where padding does."""
    labels: torch.Tensor
    tokens: int
    """Tokens that are no padding."""
    supervised: int
    """Tokens that carry the loss."""
    position_ids: torch.Tensor | None = None
    """Only when rows share sequences: positions within each row, padding counting as a row of its own."""
    rows: tuple[int, ...] = ()
    """Which rows these are; in the order of the sequences, unless rows share them."""

    def split(self, sequences: int) -> Iterator[Batch]:
        """Micro-batches of at most so many sequences, each cut to its own longest one."""
        for start in range(0, len(self.input_ids), sequences):
            part = slice(start, start + sequences)
            mask = self.attention_mask[part]
            width = int(mask.sum(dim=1).max())
            labels = self.labels[part, :width]
            yield Batch(
                self.input_ids[part, :width],
                mask[:, :width],
                labels,
                int(mask.sum()),
                int((labels != IGNORED).sum()),
                None if self.position_ids is None else self.position_ids[part, :width],
                self.rows[part] if self.position_ids is None else (),
            )

    def inputs(self) -> dict[str, torch.Tensor]:
        """What a causal language model takes; rows that share a sequence are told apart by their positions."""
        if self.position_ids is None:
            return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "labels": self.labels}
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "labels": self.labels}


def padded(ids: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], pad_id: int) -> Batch:
    """One row a sequence."""
    width = max(map(len, ids))
    input_ids = torch.full((len(ids), width), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    all_labels = torch.full_like(input_ids, IGNORED)
    for place, (row, label) in enumerate(zip(ids, labels, strict=True)):
        input_ids[place, : len(row)] = row
        attention_mask[place, : len(row)] = 1
        all_labels[place, : len(row)] = label
    return Batch(input_ids, attention_mask, all_labels, int(attention_mask.sum()), int((all_labels != IGNORED).sum()))
