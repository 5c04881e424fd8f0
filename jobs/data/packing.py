"""Several rows in one sequence, each as if it were alone: positions start again with every row.

transformers reads restarting positions (without an attention mask) as a mask that keeps the rows apart, where the
model's attention takes one. Layers that carry a state along the sequence do not, so a model is checked first.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .batch import Batch, padded

TOLERANCE = 1e-5
"""Largest difference of a hidden state, relative to the largest state, that counts as rounding in float32."""
_LENGTHS = (7, 12, 5)


def packed(ids: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], pad_id: int, length: int) -> Batch:
    """Rows in sequences of at most ``length`` tokens (a longer row alone in its own), longest rows first."""
    sequences = first_fit([len(row) for row in ids], length)
    batch = padded(
        [torch.cat([ids[row] for row in sequence]) for sequence in sequences],
        [torch.cat([labels[row] for row in sequence]) for sequence in sequences],
        pad_id,
    )
    position_ids = torch.empty_like(batch.input_ids)
    for place, sequence in enumerate(sequences):
        lengths = [len(ids[row]) for row in sequence]
        lengths.append(position_ids.shape[1] - sum(lengths))
        position_ids[place] = torch.cat([torch.arange(size) for size in lengths])
    return Batch(batch.input_ids, batch.attention_mask, batch.labels, batch.tokens, batch.supervised, position_ids)


def first_fit(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Which rows share a sequence: first fit decreasing, at most 11/9 of the fewest sequences (Johnson 1973)."""
    sequences: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = next((at for at, left in enumerate(room) if left >= lengths[row]), None)
        if place is None:
            sequences.append([row])
            room.append(length - lengths[row])
        else:
            sequences[place].append(row)
            room[place] -= lengths[row]
    return sequences


def packing_problem(model: Any) -> str | None:
    """Why rows cannot share a sequence in this model, or None when they can.

    Runs the model's own first layers, one of each kind, in float32 on rows alone and packed, and compares the hidden
    states. Model and weights are left as they are.
    """
    implementation = getattr(model.config, "_attn_implementation", "")
    if implementation not in ("eager", "sdpa"):
        return f"the attention {implementation} cannot be checked on the CPU"
    try:
        return _compare(_shortened(model), model.get_input_embeddings())
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        return f"the check of the model failed: {(str(error).splitlines() or [type(error).__name__])[0]}"


def _compare(base: Any, embedding: nn.Module) -> str | None:
    rows = [torch.arange(size) % 3 + 1 + place for place, size in enumerate(_LENGTHS)]
    batch = packed(rows, rows, 0, sum(_LENGTHS) + 2)
    assert batch.position_ids is not None
    with torch.no_grad():
        together = _states(base, embedding, batch.input_ids, position_ids=batch.position_ids)[0]
        start = 0
        for row in sorted(rows, key=len, reverse=True):
            alone = _states(base, embedding, row[None])[0]
            difference = (together[start : start + len(row)] - alone).abs().max() / alone.abs().max()
            if not difference <= TOLERANCE:
                return f"rows that share a sequence would see each other (hidden states differ by {difference:.1e})"
            start += len(row)
    return None


def _states(base: Any, embedding: nn.Module, ids: torch.Tensor, **positions: torch.Tensor) -> torch.Tensor:
    states: torch.Tensor = base(inputs_embeds=embedding(ids).float(), use_cache=False, **positions).last_hidden_state
    return states


def _shortened(model: Any) -> Any:
    """A float32 copy of the base model without embedding, with the shortest beginning that has every kind of layer."""
    base = model.base_model
    layers = base.layers
    count = _kinds_end(model.config, layers)
    kept = nn.ModuleList([copy.deepcopy(layer) for layer in list(layers)[:count]])
    embedding = model.get_input_embeddings()
    shortened = copy.deepcopy(base, {id(layers): kept, id(embedding): nn.Identity()})
    shortened.config.num_hidden_layers = count
    return shortened.float().eval()


def _kinds_end(config: Any, layers: Sequence[nn.Module]) -> int:
    """Layers up to the first one of the last kind that appears, at least two."""
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    seen: dict[object, int] = {}
    for at, layer in enumerate(layers):
        kind = (types[at], *(type(module).__name__ for module in layer.modules()))
        seen.setdefault(kind, at)
    return min(len(layers), max(2, max(seen.values()) + 1))
