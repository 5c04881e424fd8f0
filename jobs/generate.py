"""Greedy generation with any Hugging Face causal language model, a streamed one included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from .data import pad_id, stop_ids
from .errors import InputError


def generate(model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int, batch: int) -> list[str]:
    """Continue each rendered prompt greedily; return the new text alone, up to where the answer ends.

    Prompts are tokenized without automatic special tokens, because rendered ones hold theirs (`data.render_prompt`
    makes one of plain text). ``batch`` rows of similar length run at once, padded on the left. Raises InputError for
    a prompt without tokens or one that leaves no room in a model with a limited number of positions.
    """
    if not prompts:
        return []
    ids = tokenizer(list(prompts), add_special_tokens=False, verbose=False)["input_ids"]
    room = _room(model, ids)
    stops = _stop_ids(model, tokenizer)
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    texts = [""] * len(ids)
    with _greedy(model, tokenizer, stops):
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            new_tokens = min([max_new_tokens, *(room - len(ids[i]) for i in chosen)])
            for i, row in zip(chosen, _continue(model, [ids[i] for i in chosen], new_tokens), strict=True):
                texts[i] = tokenizer.decode(_until(row, stops), skip_special_tokens=True)
    return texts


def _continue(model: Any, rows: list[list[int]], new_tokens: int) -> list[list[int]]:
    """New ids of each row of one batch."""
    width = max(map(len, rows))
    input_ids = torch.full((len(rows), width), model.generation_config.pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for place, row in enumerate(rows):
        input_ids[place, width - len(row) :] = torch.tensor(row)
        attention_mask[place, width - len(row) :] = 1
    device = model.device
    output = model.generate(
        input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), max_new_tokens=new_tokens
    )
    new: list[list[int]] = output[:, width:].tolist()
    return new


def _until(row: list[int], stops: list[int]) -> list[int]:
    """The ids before the first one that ends an answer."""
    end = next((at for at, token in enumerate(row) if token in stops), len(row))
    return row[:end]


@contextmanager
def _greedy(model: Any, tokenizer: Any, stops: list[int]) -> Iterator[None]:
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
