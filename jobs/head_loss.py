"""The loss, from the last hidden states, in chunks of tokens: all logits never exist at once.

The logits of a chunk come from the model's own code (its head, scaling and soft-caps): the causal-LM model's forward
runs with its base model replaced by one that returns the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

LOGIT_CHUNK_ELEMENTS = 2**26
"""Most logits (tokens x vocabulary) that exist at once: 256 MiB in float32."""
IGNORED = -100
"""Label of a position that has no loss, as in torch.nn.functional.cross_entropy."""

Logits = Callable[[torch.Tensor], torch.Tensor]


class _GivenStates(nn.Module):
    """Stands in for the base model and returns the hidden states it was made with."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.states)


def logits_function(model: nn.Module, forward: Callable[..., Any]) -> Logits:
    """The model's own map from hidden states (N, H) to logits (N, V); ``forward`` is the causal-LM model's forward."""
    prefix = str(model.base_model_prefix)

    def logits(states: torch.Tensor) -> torch.Tensor:
        base = model._modules[prefix]
        model._modules[prefix] = _GivenStates(states[None])
        try:
            result = forward(inputs_embeds=states[None], use_cache=False, return_dict=True).logits[0]
        finally:
            model._modules[prefix] = base
        return result  # type: ignore[no-any-return]

    return logits


def shifted(states: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (B * T) of the states that predict a supervised token, and those tokens: position t predicts label t + 1."""
    targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].reshape(-1)
    rows = (targets != IGNORED).nonzero().squeeze(1)
    return rows, targets[rows]


def loss_only(logits: Logits, states: torch.Tensor, targets: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Sum of the cross-entropies of ``targets`` (N,) given ``states`` (N, H), in float32."""
    total = torch.zeros((), dtype=torch.float32, device=states.device)
    for part in _chunks(len(targets), vocabulary):
        total += nn.functional.cross_entropy(logits(states[part]).float(), targets[part], reduction="sum")
    return total


def loss_with_gradients(
    logits: Logits,
    states: torch.Tensor,
    targets: torch.Tensor,
    normaliser: float,
    parameters: Sequence[nn.Parameter],
    vocabulary: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The loss sum(cross-entropy) / ``normaliser``, and its gradients for ``states`` (N, H) and for ``parameters``."""
    total = torch.zeros((), dtype=torch.float32, device=states.device)
    state_gradient = torch.empty_like(states)
    parameter_gradients: list[torch.Tensor] = []
    for part in _chunks(len(targets), vocabulary):
        with torch.enable_grad():
            chunk = states[part].detach().requires_grad_()
            loss = nn.functional.cross_entropy(logits(chunk).float(), targets[part], reduction="sum") / normaliser
        found = torch.autograd.grad(loss, [chunk, *parameters])
        total += loss.detach()
        state_gradient[part] = found[0]
        if parameter_gradients:
            for held, new in zip(parameter_gradients, found[1:], strict=True):
                held += new
        else:
            parameter_gradients = list(found[1:])
    return total, state_gradient, parameter_gradients or [torch.zeros_like(p) for p in parameters]


def _chunks(rows: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, LOGIT_CHUNK_ELEMENTS // vocabulary)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
