"""Rendered conversations as token ids, with the range of tokens that carries the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .render import Rendered


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a row; those from ``answer_start`` carry the loss. ``truncated`` if tokens were cut off."""

    ids: list[int]
    answer_start: int
    truncated: bool

    @property
    def supervised(self) -> int:
        """Tokens that carry the loss; 0 when the whole answer was cut off."""
        return max(0, len(self.ids) - self.answer_start)


def encode(tokenizer: Any, rows: Sequence[Rendered], max_length: int) -> list[Encoded]:
    """Tokenize whole rows; a token that straddles the start of the answer belongs to the answer.

    The first token of a row has nothing that could predict it and never carries the loss.
    """
    if not rows:
        return []
    texts = [row.text for row in rows]
    tokens = tokenizer(
        texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    encoded = []
    for row, ids, offsets in zip(rows, tokens["input_ids"], tokens["offset_mapping"], strict=True):
        start = next((at for at, (_, end) in enumerate(offsets) if end > row.answer_start), len(ids))
        encoded.append(Encoded(ids[:max_length], max(1, start), len(ids) > max_length))
    return encoded
