"""The autograd functions that a streamed unit's call, and the loss, become in the model's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..head_loss import Logits, RowLoss, Targets
from ..replay import Call
from .engine import Engine


class Arranged:
    """How the tensors that an autograd function returns were arranged in the unit's output."""

    def take(self, output: Any) -> tuple[torch.Tensor, ...]:
        self._leaves, self._spec = tree_flatten(output)
        self._places = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        tensors = tuple(self._leaves[place] for place in self._places)
        for place in self._places:
            self._leaves[place] = None
        return tensors

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        for place, tensor in zip(self._places, tensors, strict=True):
            self._leaves[place] = tensor
        return tree_unflatten(self._leaves, self._spec)


class StreamedUnit(torch.autograd.Function):
    """A unit in the model's graph: saves a key to its input, not the input."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        engine: Engine,
        unit: int,
        call: Call,
        arranged: Arranged,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.engine, ctx.unit, ctx.call = engine, unit, call
        ctx.set_materialize_grads(False)
        outputs = arranged.take(engine.forward_whole(call) if unit == engine.head else engine.forward(unit, call))
        ctx.turn = engine.turn
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        _at_the_end(ctx.engine.end_backward)
        call, ctx.call = ctx.call, None  # whoever holds the loss holds this node, and would hold the unit's arguments
        return (None, None, None, None, None, *ctx.engine.backward(ctx.unit, ctx.turn, call, gradients))


class StreamedLoss(torch.autograd.Function):
    """The head: its gradients are made together with the loss, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        logits: Logits,
        states: torch.Tensor,
        targets: Targets,
        normaliser: float | torch.Tensor | None,
        row_loss: RowLoss | None,
    ) -> torch.Tensor:
        ctx.engine = engine
        loss, ctx.state_gradient = engine.loss(logits, states, targets, normaliser, row_loss)
        ctx.turn = engine.turn
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        _at_the_end(ctx.engine.end_backward)
        state_gradient, ctx.state_gradient = ctx.state_gradient, None  # as above, and whatever becomes of it
        state_gradient = ctx.engine.loss_backward(ctx.turn, state_gradient, gradients[0])
        return None, None, state_gradient, None, None, None


def _at_the_end(work: Callable[[], None]) -> None:
    """Have autograd do ``work`` when the backward that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(work)
