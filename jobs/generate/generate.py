"""Many prompts at once: rows that have finished make room for those that wait.

A streamed model carries all its weights through the device for every token, however many rows there are, so the batch
is kept full. When a quarter of the rows has finished, the round ends; the others go on in the next one with what they
have written as part of their prompt, beside new ones. That costs one more pass over their text, which is one token's
time where streaming is the limit, and works with any cache that a model may have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria

from ..data import pad_id, stop_ids
from ..errors import InputError
from .sampling import GREEDY, Draw, Sampling

REPLACED_SHARE = 0.25
"""Share of a batch that has finished when others take its place."""


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    batch: int,
    sampling: Sampling = GREEDY,
) -> list[str]:
    """Continue each rendered prompt; return the new text alone, up to where the answer ends.

    Prompts are tokenized without automatic special tokens, because rendered ones hold theirs (`data.render_prompt`
    makes one of plain text). At most ``batch`` rows run at once, padded on the left. Raises InputError for a prompt
    without tokens or one that leaves no room in a model with a limited number of positions.
    """
    if not prompts:
        return []
    ids = tokenizer(list(prompts), add_special_tokens=False, verbose=False)["input_ids"]
    room = _room(model, ids)
    stops = _stop_ids(model, tokenizer)
    waiting = [_Row(i, row, min(max_new_tokens, room - len(row)), room) for i, row in enumerate(ids)]
    waiting.sort(key=lambda row: -len(row.prompt))  # popped from the end: rows of like length run together
    texts = [""] * len(ids)
    running: list[_Row] = []
    with _settings(model, tokenizer, stops):
        while waiting or running:
            while waiting and len(running) < batch:
                running.append(waiting.pop())
            _round(model, running, stops, sampling, more=bool(waiting))
            for row in running:
                if row.finished(stops):
                    texts[row.number] = tokenizer.decode(row.answer(stops), skip_special_tokens=True)
            running = [row for row in running if not row.finished(stops)]
    return texts


@dataclass
class _Row:
    number: int
    prompt: list[int]
    limit: int
    """Most tokens that it may write."""
    room: int
    """Positions that the model has."""
    written: list[int] = field(default_factory=list)

    def answer(self, stops: Sequence[int]) -> list[int]:
        """What was written before the first token that ends an answer."""
        end = next((at for at, token in enumerate(self.written) if token in stops), len(self.written))
        return self.written[: min(end, self.limit)]

    def finished(self, stops: Sequence[int]) -> bool:
        return len(self.written) >= self.limit or any(token in stops for token in self.written)


class _EnoughFinished(StoppingCriteria):
    """Ends a round when all rows have finished, or so many that others had better take their place."""

    def __init__(self, rows: Sequence[_Row], stops: Sequence[int], width: int, enough: int) -> None:
        self._left = torch.tensor([row.limit - len(row.written) for row in rows])
        self._stops, self._width, self._enough = torch.tensor(stops), width, enough
        self._finished = torch.zeros(len(rows), dtype=torch.bool)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._finished |= torch.isin(input_ids[:, -1].cpu(), self._stops)
        self._finished |= self._left <= input_ids.shape[1] - self._width
        done = torch.full_like(self._finished, int(self._finished.sum()) >= self._enough)
        return done.to(input_ids.device)


def _round(model: Any, rows: list[_Row], stops: Sequence[int], sampling: Sampling, *, more: bool) -> None:
    """Let rows write until enough of them have finished."""
    texts = [row.prompt + row.written for row in rows]
    width = max(map(len, texts))
    input_ids = torch.full((len(rows), width), model.generation_config.pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for place, text in enumerate(texts):
        input_ids[place, width - len(text) :] = torch.tensor(text)
        attention_mask[place, width - len(text) :] = 1
    enough = max(1, int(REPLACED_SHARE * len(rows))) if more else len(rows)
    draws = [] if sampling.greedy else [Draw(sampling, [r.number for r in rows], [len(r.written) for r in rows], width)]
    output = model.generate(
        input_ids=input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        max_new_tokens=min(
            max(row.limit - len(row.written) for row in rows),
            min(row.room - len(text) for row, text in zip(rows, texts, strict=True)),
        ),
        logits_processor=draws,
        stopping_criteria=[_EnoughFinished(rows, stops, width, enough)],
    )
    for row, new in zip(rows, output[:, width:].tolist(), strict=True):
        row.written += new


@contextmanager
def _settings(model: Any, tokenizer: Any, stops: list[int]) -> Iterator[None]:
    """The model in evaluation mode, with nothing of its own generation settings (penalties, sampling) in force."""
    training, settings = model.training, model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=False, use_cache=True, eos_token_id=stops, pad_token_id=pad_id(tokenizer)
    )
    model.eval()
    try:
        yield
    finally:
        model.generation_config = settings
        model.train(training)


def _stop_ids(model: Any, tokenizer: Any) -> list[int]:
    own = model.generation_config.eos_token_id
    own = [] if own is None else [own] if isinstance(own, int) else list(own)
    return sorted({*own, *stop_ids(tokenizer)})


def _room(model: Any, ids: list[list[int]]) -> int:
    """Positions that the model has."""
    positions = int(getattr(model.config, "max_position_embeddings", None) or 1 << 62)
    for number, row in enumerate(ids):
        if not row:
            raise InputError(f"prompt {number} has no tokens", hint="write at least one word")
        if len(row) >= positions:
            raise InputError(f"prompt {number} has {len(row)} tokens, the model has {positions} positions")
    return positions
