"""Stand-ins: the units of a Hugging Face model get a ``forward`` of ours, so the model's own code drives the engine.

Masks, rotary tables, position ids, scalings: all of that stays the model's. In training a unit's call becomes an
autograd function over every tensor among its arguments, so ``loss.backward()`` calls the units again in reverse order.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ..effects import Outcome, Places, apply, unit_call
from ..errors import ProgramError
from ..head_loss import Logits, RowLoss, forward_in_chunks, log_probabilities_of_rows
from ..replay import Call
from ..structure import LOOSE
from .engine import Engine


class StandIns:
    """Replaces the forward of a model and of its units until `remove` is called."""

    def __init__(self, model: PreTrainedModel, engine: Engine) -> None:
        self.model, self.engine = model, engine
        self.anchor = torch.zeros((), requires_grad=True, device=engine.device.torch_device)
        loose = {name: model.get_parameter(name) for name in engine.facts.loose}
        self._places = Places(model, loose)
        self._loose_parameters = loose
        self._loose: dict[str, torch.Tensor] = {}
        self._modules: list[nn.Module] = [model]
        self._depth = 0  # inside a unit: its own code runs
        self._training = self._in_chunks = False
        self._model_forward: Callable[..., Any] = model.forward
        self._logits = Logits(model, self._run_head, engine.facts.vocabulary)
        units: dict[str, list[int]] = defaultdict(list)
        for index, unit in enumerate(engine.units):
            if unit.name != LOOSE:
                units[unit.path].append(index)
        for path, indices in units.items():
            module = model.get_submodule(path)
            self._replace(module, self._unit_forward(indices, Places(module, loose), module.forward))
        self.idle = self._guard_idle(units)

        @functools.wraps(self._model_forward)  # trainers look at its parameters
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(*args, **kwargs)

        model.forward = forward

    @property
    def original_forward(self) -> Callable[..., Any]:
        """The model's own forward."""
        return self._model_forward

    def stepped_aside(self) -> AbstractContextManager[None]:
        """While entered, every unit's own code runs, on whatever weights it is bound to."""
        return self._inside()

    def remove(self) -> None:
        """Give the model its own forwards back."""
        for module in self._modules:
            del module.forward

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self._modules.append(module)

    def _guard_idle(self, units: Mapping[str, object]) -> dict[str, nn.Parameter]:
        """Parameters that no text reaches: they stay where they are, and a call that needs them is refused."""
        streamed = {id(p) for unit in self.engine.units for p in unit.parameters.values()}
        idle = {name: p for name, p in self.model.named_parameters() if id(p) not in streamed}
        for path in {name.rpartition(".")[0] for name in idle}:
            module = self.model.get_submodule(path)
            holds_units = any(unit == path or unit.startswith(f"{path}.") for unit in units)
            if path and not holds_units:
                self._replace(module, _refuse(path, module.forward))
        return idle

    def _unit_forward(self, indices: list[int], places: Places, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return run(*args, **kwargs)
            if self._in_chunks and indices[-1] == self.engine.head:
                return self._no_logits(*args)
            unit = self.engine.next_of(indices)
            if not self._training:
                with self._inside():
                    return self.engine.infer(unit, run, args, kwargs)
            call = unit_call(places, self._deep(run), self._loose, args, kwargs)
            if torch.is_grad_enabled():
                return self._streamed(unit, call, args, kwargs)
            return apply(self.engine.forward(unit, call), args, kwargs)  # a part that the model gives no gradient

        return forward

    def _streamed(self, unit: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arranged = _Arranged()
        tensors = _StreamedUnit.apply(self.anchor, self.engine, unit, call, arranged, *call.tensors())
        return apply(arranged.rebuild(tensors), args, kwargs)

    def _deep(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self._inside():
                return run(*args, **kwargs)

        return inside

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _no_logits(self, states: torch.Tensor) -> torch.Tensor:
        """What the head makes of no tokens: its loss is made elsewhere, in chunks."""
        return states.new_zeros((*states.shape[:-1], self.engine.facts.vocabulary))

    def _run_head(self, **kwargs: Any) -> Any:
        """The causal-LM model's own forward, for a chunk of hidden states, with the head's weights in place."""
        with self._inside():
            return self._model_forward(**kwargs)

    def _forward(
        self,
        *args: Any,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
        row_loss: RowLoss | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's forward; with ``labels``, and where the model allows it, the loss in chunks and no logits.

        ``row_loss`` makes the loss of the log-probabilities of each row's labels, instead of their mean.
        """
        device = self.engine.device.torch_device
        args = tuple(_to(device, value) for value in args)
        kwargs = {name: _to(device, value) for name, value in kwargs.items()}
        self._training = torch.is_grad_enabled()
        if labels is not None or self._training:
            kwargs["use_cache"] = False
        with self.engine.device.counting(), _no_writes_into_outputs(), self._with_loose():
            if labels is None:
                return self._model_forward(*args, **kwargs)
            if self.engine.facts.loss == "whole" and row_loss is not None:
                logits = self._model_forward(*args, **kwargs).logits
                return CausalLMOutput(loss=row_loss(log_probabilities_of_rows(logits, labels.to(device))))
            if self.engine.facts.loss == "whole":
                if num_items_in_batch is not None:
                    kwargs["num_items_in_batch"] = num_items_in_batch
                return self._model_forward(*args, labels=labels.to(device), **kwargs)
            kwargs.pop("logits_to_keep", None)
            return self._forward_in_chunks(args, kwargs, labels.to(device), num_items_in_batch, row_loss)

    def _forward_in_chunks(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        labels: torch.Tensor,
        items: Any,
        row_loss: RowLoss | None,
    ) -> CausalLMOutput:
        normaliser = None if items is None else float(items)

        def loss(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                streamed: torch.Tensor = _StreamedLoss.apply(
                    self.engine, self._logits, states, labels, normaliser, row_loss
                )
                return streamed
            return self.engine.infer_loss(self._logits, states, labels, normaliser, row_loss)

        self._in_chunks = True
        try:
            output = forward_in_chunks(self.model, self._model_forward, loss, args, kwargs, labels)
        finally:
            self._in_chunks = False
        return CausalLMOutput(loss=output[0] if isinstance(output, tuple) else output.loss)

    @contextmanager
    def _with_loose(self) -> Iterator[None]:
        """Load the loose parameters, for the whole model to read."""
        if not self._loose_parameters:
            yield
            return
        parameters = list(self._loose_parameters.values())
        call = Call.of(lambda: Outcome(tuple(p.view_as(p) for p in parameters), {}, []), (), {})
        if torch.is_grad_enabled():
            tensors = self._streamed(0, call, (), {})
        else:
            tensors = self.engine.infer(0, call.forward, (), {}).output
        self._loose = dict(zip(self._loose_parameters, tensors, strict=True))
        with self._places.holding(self._loose):
            yield
        self._loose = {}


@contextmanager
def _no_writes_into_outputs() -> Iterator[None]:
    """Name the reason where a model writes into what a unit returned and the engine still holds."""
    try:
        yield
    except RuntimeError as error:
        if "modified inplace" not in str(error):
            raise
        raise ProgramError(
            "the model writes into a tensor that one of its parts returned and that backward still needs",
            hint="this architecture cannot be streamed",
        ) from error


def _refuse(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise ProgramError(
            f"{path} runs, which no forward of text reaches: its weights are not streamed",
            hint="give the model text only",
        )

    return refused


class _Arranged:
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
        ctx: Any,
        anchor: torch.Tensor,
        engine: Engine,
        unit: int,
        call: Call,
        arranged: _Arranged,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.engine, ctx.unit, ctx.call = engine, unit, call
        ctx.set_materialize_grads(False)
        outputs = arranged.take(engine.forward_whole(call) if unit == engine.head else engine.forward(unit, call))
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        _at_the_end(ctx.engine.end_backward)
        return (None, None, None, None, None, *ctx.engine.backward(ctx.unit, ctx.call, gradients))


class _StreamedLoss(torch.autograd.Function):
    """The head: its gradients are made together with the loss, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        logits: Logits,
        states: torch.Tensor,
        labels: torch.Tensor,
        normaliser: float | None,
        row_loss: RowLoss | None,
    ) -> torch.Tensor:
        ctx.engine = engine
        loss, ctx.state_gradient = engine.loss(logits, states, labels, normaliser, row_loss)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        _at_the_end(ctx.engine.end_backward)
        state_gradient = ctx.engine.loss_backward(ctx.state_gradient, gradients[0])
        ctx.state_gradient = None
        return None, None, state_gradient, None, None, None


def _at_the_end(work: Callable[[], None]) -> None:
    """Have autograd do ``work`` when the backward that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(work)


def _to(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
