"""Rendered conversations as token ids, with the ranges of tokens that carry the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError
from .template_spans import Rendered, Span

_NEAR = 8
_MARGIN = 256


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a row; those in ``spans`` carry the loss. ``truncated`` if tokens were cut off."""

    ids: list[int]
    spans: tuple[Span, ...]
    truncated: bool

    @property
    def supervised(self) -> int:
        """Tokens that carry the loss; 0 when all answers were cut off."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True, slots=True)
class Limit:
    """Tokens that are kept of a row, and the characters that can matter for them."""

    tokens: int
    characters: int

    @classmethod
    def of(cls, tokenizer: Any, tokens: int) -> Limit:
        """As many characters as that many of the longest tokens have, and some more."""
        longest = max(map(len, tokenizer.get_vocab()))
        return cls(tokens, (tokens + _MARGIN) * longest + _MARGIN)


def tokenized(tokenizer: Any, rows: Sequence[Rendered], limit: Limit) -> list[Any]:
    """Rows as the tokenizer's own encodings; of a row far longer than the limit, a part that is longer than it.

    A row of 100 MB would take gigabytes, of which almost all is cut off. Holds no lock, so that a thread can do it
    beside other work.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    texts = [row.text[: limit.characters] for row in rows]
    encodings: list[Any] = backend.encode_batch(texts, add_special_tokens=False)
    for at, row in enumerate(rows):
        if len(row.text) > limit.characters and len(encodings[at].ids) <= limit.tokens + _MARGIN:
            encodings[at] = backend.encode(row.text, add_special_tokens=False)  # long blanks or unknown words
    return encodings


def encode(tokenizer: Any, rows: Sequence[Rendered], encodings: Sequence[Any], limit: Limit) -> list[Encoded]:
    """Ids and spans of tokenized rows; a token that straddles an edge of an answer belongs to the answer.

    The first token of a row has nothing that could predict it and never carries the loss. The first whole row is
    decoded again: ModelError if what carries the loss is not what the assistant says.
    """
    max_length, encoded, checked = limit.tokens, [], False
    for row, encoding in zip(rows, encodings, strict=True):
        ids = encoding.ids
        spans = tuple(_token_span(encoding, span, len(row.text), len(ids)) for span in row.spans)
        if not checked and len(row.text) <= limit.characters:
            checked = _check(tokenizer, row, ids, spans, encoding)
        kept = tuple((start, min(stop, max_length)) for start, stop in spans if start < min(stop, max_length))
        encoded.append(Encoded(ids[:max_length], kept, len(ids) > max_length))
    return encoded


def _token_span(encoding: Any, span: Span, characters: int, tokens: int) -> Span:
    start = _first_token(encoding, span[0], span[1], tokens)
    if span[1] >= characters:
        return max(1, start), tokens
    stop = _first_token(encoding, span[1], characters, tokens)
    if stop < tokens and encoding.token_to_chars(stop)[0] < span[1]:
        stop += 1
    return max(1, start), stop


def _first_token(encoding: Any, character: int, limit: int, tokens: int) -> int:
    """The first token that ends behind a character; characters may belong to no token (blanks)."""
    for at in range(character, min(character + _NEAR, limit)):
        token = encoding.char_to_token(at)
        if token is not None:
            return int(token)
    return next((at for at, (_, end) in enumerate(encoding.offsets) if end > character), tokens)


def _check(tokenizer: Any, row: Rendered, ids: list[int], spans: Sequence[Span], encoding: Any) -> bool:
    """Whether the row's supervised tokens were decoded and found to be its answers."""
    for (start, stop), (first, last) in zip(spans, row.spans, strict=True):
        if start >= stop:
            return False
        offsets = encoding.offsets
        begin = offsets[start][0] if offsets[start][0] < first < offsets[start][1] else first
        end = offsets[stop - 1][1] if offsets[stop - 1][0] < last < offsets[stop - 1][1] else last
        text = row.text[begin:end]
        again = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if _plain(tokenizer, ids[start:stop]) != _plain(tokenizer, again) and start > 1:
            raise ModelError(
                f"the tokenizer's character offsets are wrong: {_plain(tokenizer, ids[start:stop])[:80]!r} carries "
                f"the loss instead of {_plain(tokenizer, again)[:80]!r}",
                hint="use the model's own tokenizer.json",
            )
    return True


def _plain(tokenizer: Any, ids: list[int]) -> str:
    return "".join(str(tokenizer.decode(ids, skip_special_tokens=False)).split())
