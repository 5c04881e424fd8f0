"""Stand-ins: the units of a Hugging Face model get a ``forward`` of ours, so the model's own code drives the engine.

Masks, rotary tables, position ids, scalings: all of that stays the model's. In training a unit's call becomes an
autograd function over every tensor among its arguments, so ``loss.backward()`` calls the units again in reverse order.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ..effects import Outcome, Places, apply, unit_call
from ..errors import ProgramError
from ..head_loss import Logits, RowLoss, Targets, forward_in_chunks, log_probabilities_of_rows, takes_a_count
from ..replay import Autocast, Call, outside_inference_mode
from ..structure import LOOSE
from .engine import Engine
from .functions import Arranged, StreamedLoss, StreamedUnit
from .makeup import Makeup
from .patches import Patches


class StandIns:
    """Replaces the forward of a model and of its units, by way of ``patches``."""

    def __init__(self, model: PreTrainedModel, engine: Engine, patches: Patches) -> None:
        self.model, self.engine, self._patches = model, engine, patches
        self.anchor = torch.zeros((), requires_grad=True, device=engine.device.torch_device)
        loose = {name: model.get_parameter(name) for name in engine.facts.loose}
        self._places = Places(model, loose)
        self._loose_parameters = loose
        self._loose: dict[str, torch.Tensor] = {}
        self._depth = 0  # inside a unit: its own code runs
        self._training = self._in_chunks = self._entered = self._aside = False
        self._model_forward = model.forward
        self._makeup = Makeup(model)
        self._logits = Logits(model, self._run_head, engine.facts.vocabulary)
        units: dict[str, list[int]] = defaultdict(list)
        for index, unit in enumerate(engine.units):
            if unit.name != LOOSE:
                units[unit.path].append(index)
        for path, indices in units.items():
            module = model.get_submodule(path)
            patches.set(module, "forward", self._unit_forward(indices, Places(module, loose), module.forward))
        self.idle = self._guard_idle(units)
        patches.set(model, "forward", self._whole_forward(model.forward))
        if model.base_model is not model:
            patches.set(model.base_model, "forward", self._base_forward(model.base_model.forward))
        patches.set(model, "get_output_embeddings", self._output_embeddings(model.get_output_embeddings))

    def _guard_idle(self, units: Mapping[str, object]) -> dict[str, nn.Parameter]:
        """Parameters that no text reaches: they stay where they are, and a call that needs them is refused."""
        streamed = {id(p) for unit in self.engine.units for p in unit.parameters.values()}
        idle = {name: p for name, p in self.model.named_parameters() if id(p) not in streamed}
        for path in {name.rpartition(".")[0] for name in idle}:
            module = self.model.get_submodule(path)
            holds_units = any(unit == path or unit.startswith(f"{path}.") for unit in units)
            if path and not holds_units:
                self._patches.set(module, "forward", _refuse(path, module.forward))
        return idle

    def _unit_forward(self, indices: list[int], places: Places, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._depth or not self._entered:  # somebody calls a part of the model alone: its parameters are at rest
                return run(*args, **kwargs)
            if self._in_chunks and indices[-1] == self.engine.head:
                return self._no_logits(*args)
            unit = self.engine.next_of(indices)
            if not self._training:
                with self._inside(), Autocast.now(self._device.type).active():
                    return self.engine.infer(unit, run, args, kwargs)
            call = unit_call(places, self._deep(run), self._loose, args, kwargs)
            if torch.is_grad_enabled():
                call.kernels_follow_graph = self.engine.facts.units[unit].kernels_follow_graph
                return self._streamed(unit, call, args, kwargs)
            self._check_alone(unit)
            return apply(self.engine.forward(unit, call), args, kwargs)  # a part that the model gives no gradient

        return forward

    def _check_alone(self, unit: int) -> None:
        if around := autograd_function_around():
            raise ProgramError(
                f"the model runs {self.engine.units[unit].name} inside an autograd function of its own, {around}, "
                "whose backward would run parts of it when their weights are not on the device",
                hint="this architecture cannot be streamed",
            )

    def _streamed(self, unit: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arranged = Arranged()
        tensors = StreamedUnit.apply(self.anchor, self.engine, unit, call, arranged, *call.tensors())
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

    @contextmanager
    def stepped_aside(self) -> Iterator[None]:
        """While entered, the model's own code runs, on whatever weights the units are bound to."""
        self._aside = self._entered = True
        try:
            with self._inside():
                yield
        finally:
            self._aside = self._entered = False

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
        if self._aside:
            return self._model_forward(*args, **kwargs)
        if labels is None:
            with self._entry(args, kwargs) as (args, kwargs):
                return self._model_forward(*args, **kwargs)
        kwargs["use_cache"], targets = False, Targets.of(labels)
        with self._entry(args, kwargs) as (args, kwargs):
            if self.engine.facts.loss == "whole" and row_loss is not None:
                logits = self._model_forward(*args, **kwargs).logits
                return CausalLMOutput(loss=row_loss(log_probabilities_of_rows(logits, targets.moved(self._bring))))
            if self.engine.facts.loss == "whole":
                return self._forward_whole(args, kwargs, self._bring(labels), len(targets.rows), num_items_in_batch)
            kwargs.pop("logits_to_keep", None)
            return self._forward_in_chunks(args, kwargs, labels, targets, num_items_in_batch, row_loss)

    def _forward_whole(
        self, args: Any, kwargs: dict[str, Any], labels: torch.Tensor, supervised: int, count: Any
    ) -> Any:
        """The model's own loss, of all logits. One that knows of no count is the mean of this micro-batch alone.

        The logits are not returned, as by a loss in chunks: whoever held them would hold them while backward runs.
        """
        if count is not None and takes_a_count(self.model):
            kwargs["num_items_in_batch"] = count
        output = self._model_forward(*args, labels=labels, **kwargs)
        loss = output[0] if isinstance(output, tuple) else output.loss
        if count is not None and not takes_a_count(self.model):
            loss = loss * (supervised / count)
        return CausalLMOutput(loss=loss)

    def _whole_forward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)  # trainers look at its parameters
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(*args, **kwargs)

        return forward

    def _base_forward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The base model's forward, for those who make the loss from its hidden states themselves."""

        @functools.wraps(run)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._entered:
                return run(*args, **kwargs)
            with self._entry(args, kwargs) as (args, kwargs):
                return run(*args, **kwargs)

        return forward

    @contextmanager
    def _entry(self, args: Any, kwargs: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """A forward of the model from outside: gives its arguments, on the device."""
        self._training = torch.is_grad_enabled()
        self._makeup.check()
        with outside_inference_mode():
            args = tuple(self._bring(value) for value in args)
            kwargs = {name: self._bring(value) for name, value in kwargs.items()}
        if self._training:
            kwargs["use_cache"] = False
            self._makeup.check_learning()
        self._entered = True
        self.engine.enter_model()
        try:
            with self.engine.device.counting(), outside_inference_mode(), _no_writes_into_outputs(), self._with_loose():
                yield args, kwargs
        finally:
            self._entered = False

    @property
    def _device(self) -> torch.device:
        return self.engine.device.torch_device

    def _bring(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return self.engine.device.bring(value.clone() if value.is_inference() else value)

    def _output_embeddings(self, original: Callable[[], Any]) -> Callable[[], Any]:
        """After a forward of the base model alone, the head's weights for whoever makes the logits from them."""
        path = self.engine.units[self.engine.head].path

        def output_embeddings() -> Any:
            head = original()
            plain = type(head) is nn.Linear and head is self.model.get_submodule(path)
            if self._entered or not plain or not self.engine.head_is_next():
                return head
            return self._head_to_read(head)

        return output_embeddings

    def _head_to_read(self, head: nn.Module) -> _HeadToRead:
        parameters = self.engine.units[self.engine.head].parameters
        call = Call.of(lambda: Outcome(tuple(p.view_as(p) for p in parameters.values()), {}, []), (), {})
        if self._training:
            tensors = self._streamed(self.engine.head, call, (), {})
        else:
            tensors = self.engine.infer(self.engine.head, call.forward, (), {}).output
        read = {
            name: tensor if parameter.requires_grad else tensor.detach()
            for (name, parameter), tensor in zip(parameters.items(), tensors, strict=True)
        }
        return _HeadToRead(**read)

    def _forward_in_chunks(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        labels: torch.Tensor,
        targets: Targets,
        items: Any,
        row_loss: RowLoss | None,
    ) -> CausalLMOutput:
        labels, normaliser = self._bring(labels), self._normaliser(items)

        def loss(states: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            here = targets.moved(self._bring)
            if torch.is_grad_enabled():
                streamed: torch.Tensor = StreamedLoss.apply(
                    self.engine, self._logits, states, here, normaliser, row_loss
                )
                return streamed
            return self.engine.infer_loss(self._logits, states, here, normaliser, row_loss)

        self._in_chunks = True
        try:
            output = forward_in_chunks(self.model, self._model_forward, loss, args, kwargs, labels)
        finally:
            self._in_chunks = False
        return CausalLMOutput(loss=output[0] if isinstance(output, tuple) else output.loss)

    def _normaliser(self, items: Any) -> float | torch.Tensor | None:
        """The number of supervised tokens of the step, if it is given; where it is on the GPU, nobody looks at it."""
        if isinstance(items, torch.Tensor) and items.device.type != "cpu":
            return items.clamp(min=1)
        return None if items is None else float(items) or None

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


def autograd_function_around() -> str:
    """Name of the autograd function whose forward is running; empty if none is."""
    frame = inspect.currentframe()
    while frame is not None:
        first = next(iter(frame.f_locals.values()), None)
        if isinstance(first, FunctionCtx):
            return type(first).__name__.removesuffix("Backward")
        frame = frame.f_back
    return ""


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


@dataclass(frozen=True)
class _HeadToRead:
    """What is read of a head that is not called: its weights are on the device as long as this is held."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
