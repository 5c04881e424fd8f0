"""Stand-ins: the units of a Hugging Face model get a ``forward`` of ours, so the model's own code drives the engine.

Masks, rotary tables, position ids, scalings: all of that stays the model's. In training a unit's call becomes an
autograd function over every tensor among its arguments, so ``loss.backward()`` calls the units again in reverse order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ..errors import ProgramError
from ..head_loss import Logits
from ..replay import Call
from .engine import Engine


class StandIns:
    """Replaces the forward of a model and of its units until `remove` is called."""

    def __init__(self, model: PreTrainedModel, engine: Engine) -> None:
        self.model, self.engine = model, engine
        self.anchor = torch.zeros((), requires_grad=True, device=engine.device.torch_device)
        self._modules: list[nn.Module] = [model]
        self._in_head = False
        self._model_forward = model.forward
        self._logits = Logits(model, self._run_head, engine.facts.vocabulary)
        for index, unit in enumerate(engine.units[:-1]):
            module = model.get_submodule(unit.name)
            self._replace(module, self._unit_forward(index, module.forward))
        head = model.get_submodule(engine.units[engine.head].name)
        self._replace(head, self._head_forward(head.forward))
        model.forward = self._forward

    def remove(self) -> None:
        """Give the model its own forwards back."""
        for module in self._modules:
            del module.forward

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self._modules.append(module)

    def _unit_forward(self, unit: int, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return self.engine.infer(unit, run, args, kwargs)
            call = Call.of(run, args, kwargs)
            outcome = _Outcome()
            tensors = _StreamedUnit.apply(self.anchor, self.engine, unit, call, outcome, *call.tensors())
            return outcome.rebuild(tensors)

        return forward

    def _head_forward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._in_head:
                return run(*args, **kwargs)
            if torch.is_grad_enabled():
                raise ProgramError(
                    "the model was asked for logits with gradients, but the loss is computed inside the head",
                    hint="pass labels=..., or evaluate under torch.no_grad()",
                )
            return self.engine.infer(self.engine.head, run, args, kwargs)

        return forward

    def _run_head(self, **kwargs: Any) -> Any:
        """The causal-LM model's own forward, for a chunk of hidden states, with the head's weights in place."""
        self._in_head = True
        try:
            return self._model_forward(**kwargs)
        finally:
            self._in_head = False

    def _forward(
        self, *args: Any, labels: torch.Tensor | None = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """The model's forward; with ``labels``, the loss in chunks and no logits."""
        device = self.engine.device.torch_device
        args = tuple(_to(device, value) for value in args)
        kwargs = {name: _to(device, value) for name, value in kwargs.items()}
        with self.engine.device.counting():
            if labels is None:
                return self._model_forward(*args, **kwargs)
            kwargs = {**kwargs, "use_cache": False}
            kwargs.pop("logits_to_keep", None)
            states = self.model.base_model(*args, **kwargs)[0]
            normaliser = None if num_items_in_batch is None else float(num_items_in_batch)
            if torch.is_grad_enabled():
                loss = _StreamedLoss.apply(self.engine, self._logits, states, labels.to(device), normaliser)
            else:
                loss = self.engine.infer_loss(self._logits, states, labels.to(device), normaliser)
        return CausalLMOutput(loss=loss)


class _Outcome:
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


class _StreamedUnit(torch.autograd.Function):
    """A unit in the model's graph: saves a key to its input, not the input."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, engine: Engine, unit: int, call: Call, outcome: _Outcome, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.engine, ctx.unit, ctx.call = engine, unit, call
        ctx.set_materialize_grads(False)
        outputs = outcome.take(engine.forward(unit, call))
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return (None, None, None, None, None, *ctx.engine.backward(ctx.unit, ctx.call, gradients))


class _StreamedLoss(torch.autograd.Function):
    """The head: its gradients are made together with the loss, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, logits: Logits, states: torch.Tensor, labels: torch.Tensor, normaliser: float | None
    ) -> torch.Tensor:
        ctx.engine = engine
        loss, ctx.state_gradient = engine.loss(logits, states, labels, normaliser)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        state_gradient = ctx.engine.loss_backward(ctx.state_gradient, gradients[0])
        ctx.state_gradient = None
        return None, None, state_gradient, None, None


def _to(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
