"""Facts of any Hugging Face decoder at one batch shape, measured on fake tensors: no weights, no GPU.

The model's own forward runs under FakeTensorMode, where tensors have shapes but no memory. Each unit it calls is
measured the way the executor will run it: forward without a graph, then again with one and backward. A storage tracker
gives peaks (equal to the byte to those of a real CPU run), saved-tensor hooks what autograd keeps, a FLOP counter the
work. Units of equal structure are measured once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .errors import ModelError
from .head_loss import Logits, chunk_tokens, loss_with_gradients
from .layout import Layout
from .memory import StorageTracker
from .model_facts import ModelFacts, UnitFacts, UnitKind
from .replay import PRODUCTS, Call, output_tensors, padded_bytes

DType = Literal["float32", "bfloat16"]
LAYER_LISTS = ("layers", "h", "blocks")


def model_facts(
    model_or_config: PreTrainedModel | PretrainedConfig | dict[str, Any],
    *,
    micro_batch: int,
    sequence_length: int,
    dtype: DType = "bfloat16",
) -> ModelFacts:
    """Measure a causal language model, given as a model, a configuration or a configuration dict.

    Raises ModelError for a model that cannot be streamed, with the reason.
    """
    config = _config_of(model_or_config)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    with FakeTensorMode():
        model = _build(config, torch_dtype)
        _check_positions(model, sequence_length)
        trace = _Trace(model)
        with trace.watching(), torch.no_grad():
            side_bytes = _run(model, trace, micro_batch, sequence_length)
        head = _head_facts(model, trace, micro_batch * sequence_length, torch_dtype)
    before, layers, after = (
        tuple(u for u in trace.measured if u.kind == kind) for kind in ("before", "layer", "after")
    )
    return ModelFacts(
        architecture=type(model).__name__,
        dtype=dtype,
        micro_batch=micro_batch,
        sequence_length=sequence_length,
        hidden_size=model.get_output_embeddings().weight.shape[1],
        vocabulary=model.get_output_embeddings().weight.shape[0],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        side_bytes=side_bytes,
        before=before,
        layers=layers,
        after=after,
        head=head,
    )


def layer_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and modules of the model's decoder layers: the longest list called ``layers``, ``h`` or ``blocks``."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.rsplit(".", 1)[-1] in LAYER_LISTS and len(module)
    ]
    if not lists:
        raise ModelError(
            f"{type(model).__name__} has no list of layers called {', '.join(LAYER_LISTS)}",
            hint="only decoder models whose layers run one after the other can be streamed",
        )
    return max(lists, key=lambda pair: len(pair[1]))


def unit_layout(module: nn.Module) -> Layout:
    """Flat layout of the module's parameters, by their names inside it."""
    return Layout.of({name: tuple(parameter.shape) for name, parameter in module.named_parameters()})


def head_name(model: PreTrainedModel) -> str:
    """Path of the output embedding. Raises ModelError for a model without one."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head and head is not None:
            return str(name)
    raise ModelError(f"{type(model).__name__} has no output embedding, so it is no causal language model")


def _config_of(source: PreTrainedModel | PretrainedConfig | dict[str, Any]) -> PretrainedConfig:
    if isinstance(source, PreTrainedModel):
        return source.config
    if isinstance(source, PretrainedConfig):
        return source
    settings = dict(source)
    try:
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    except (KeyError, ValueError) as error:
        raise ModelError(f"not a known model configuration: {error}", hint="it needs a model_type") from error


def _build(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ModelError(
            f"{type(config).__name__} describes no causal language model that transformers knows",
            hint="only decoder-only language models can be fine-tuned here",
        ) from error
    return model.train()


def _check_positions(model: PreTrainedModel, length: int) -> None:
    """Fake tensors do not notice a position beyond a learned table of positions, so it is checked here."""
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and name.endswith(("wpe", "embed_positions", "position_embeddings"))
        if is_table and module.num_embeddings < length:
            raise ModelError(
                f"{type(model).__name__} has {module.num_embeddings} positions, the rows have {length} tokens",
                hint="set data.max_length to at most the model's positions",
            )


def _run(model: PreTrainedModel, trace: _Trace, rows: int, length: int) -> int:
    """One forward on fake ids; returns the bytes that stay alive beside the units."""
    with trace.tracker:
        ids = torch.ones((rows, length), dtype=torch.int64)
        mask, labels = torch.ones_like(ids), torch.ones_like(ids)
        try:
            model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
        except RuntimeError as error:
            raise ModelError(f"{type(model).__name__} cannot run on {rows} x {length} tokens: {error}") from error
        del labels
    trace.check_complete(model)
    return trace.side_bytes


@dataclass(frozen=True)
class _Known:
    """Facts of a unit, and what it returns."""

    facts: UnitFacts
    output: Any


@dataclass
class _Trace:
    """Measures every unit at the moment the model calls it."""

    model: PreTrainedModel
    tracker: StorageTracker = field(default_factory=StorageTracker)
    measured: list[UnitFacts] = field(default_factory=list)
    side_bytes: int = 0
    _known: dict[tuple[Any, ...], _Known] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _owner_of: dict[int, str] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Replace the forward of each unit by one that measures first."""
        self.layers_name, layers = layer_list(self.model)
        units = {f"{self.layers_name}.{i}": layer for i, layer in enumerate(layers)}
        skip = (f"{self.layers_name}.", head_name(self.model))
        for name, module in self.model.named_modules():
            if name and not name.startswith(skip) and next(module.parameters(recurse=False), None) is not None:
                units[name] = module
        try:
            for name, module in units.items():
                module.forward = self._measuring(name, module, module.forward)
            yield
        finally:
            for module in units.values():
                del module.forward

    def check_complete(self, model: PreTrainedModel) -> None:
        """Raise ModelError if some parameters belong to no unit that ran."""
        streamed = {*(unit.name for unit in self.measured), head_name(model)}
        lost = [n for n, _ in model.named_parameters() if not any(n.startswith(f"{unit}.") for unit in streamed)]
        if lost:
            raise ModelError(
                f"{type(model).__name__} has parameters that a forward of text does not reach: {lost[0]}",
                hint="this architecture cannot be streamed",
            )

    def owner(self, name: str, module: nn.Module) -> str:
        """Name of the earlier unit that has this unit's parameters too, or ""."""
        owners = {self._owner_of.setdefault(id(p), name) for p in module.parameters()}
        if len(owners) > 1:
            raise ModelError(
                f"{name} shares some of its parameters with another unit but not all: it cannot be streamed"
            )
        return "" if owners == {name} else owners.pop()

    def _measuring(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            call = Call.of(forward, args, kwargs)
            kind = self._kind(name)
            if kind != "before":
                live = self.tracker.live_bytes - _bytes(call.leaves[call.boundary])
                self.side_bytes = max(self.side_bytes, live)
            known = self._measured_once(name, kind, module, call)
            if name not in self._seen:
                self._seen.add(name)
                shared = {"name": name, "kind": kind, "shares_weights_with": self.owner(name, module)}
                self.measured.append(known.facts.model_copy(update=shared))
            return tree_map_only(torch.Tensor, torch.empty_like, known.output)

        return run

    def _measured_once(self, name: str, kind: UnitKind, module: nn.Module, call: Call) -> _Known:
        shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
        inputs = tuple((tuple(t.shape), t.dtype) for t in call.tensors())
        key = (_variety(module), shapes, inputs)
        if key not in self._known:
            with _untracked():
                self._known[key] = _measure(name, kind, _variety(module), module, call)
        return self._known[key]

    def _kind(self, name: str) -> UnitKind:
        if name.startswith(f"{self.layers_name}."):
            return "layer"
        return "after" if any(unit.kind == "layer" for unit in self.measured) else "before"


@contextmanager
def _untracked() -> Iterator[None]:
    """Leave the tracker of the whole model, so that measuring one unit does not count in it."""
    with torch.utils._python_dispatch._disable_current_modes() as modes:
        fake = next(mode for mode in modes if isinstance(mode, FakeTensorMode))
        with fake:
            yield


def _variety(module: nn.Module) -> str:
    """Class of a unit, with its sort of attention where a model has several."""
    for attribute in ("layer_type", "attention_type"):
        value = getattr(module, attribute, None)
        if isinstance(value, str):
            return f"{type(module).__name__}/{value}"
    return type(module).__name__


def _measure(name: str, kind: UnitKind, variety: str, module: nn.Module, call: Call) -> _Known:
    parameters = list(module.parameters())
    output, forward_peak, flops, products = _measure_forward(call)
    outputs = output_tensors(output)
    saved = _measure_saved(call, parameters)
    output_bytes = sum(_bytes(output) for output in outputs)
    facts = UnitFacts(
        name=name,
        kind=kind,
        variety=variety,
        parameters=sum(p.numel() for p in parameters),
        weight_bytes=unit_layout(module).numel * parameters[0].element_size(),
        forward_flops=float(flops),
        output_bytes=output_bytes,
        saved_bytes=saved,
        saved_matmul_bytes=products,
        forward_workspace_bytes=max(0, forward_peak - output_bytes),
        backward_workspace_bytes=_measure_backward(call, outputs, parameters),
    )
    return _Known(facts, output)


def _measure_forward(call: Call) -> tuple[Any, int, int, int]:
    tracker, products = StorageTracker(), _ProductBytes()
    flops = FlopCounterMode(display=False, custom_mapping=_FLOP_FORMULAS)
    with torch.no_grad(), flops, products, tracker:
        output = call.forward()
    return output, tracker.peak_bytes, flops.get_total_flops(), products.bytes


def _measure_saved(call: Call, parameters: list[nn.Parameter]) -> int:
    own = {t.untyped_storage()._cdata for t in [*parameters, *call.tensors()]}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        graphed = call.forward_with_graph()
    total = sum(padded_bytes(tensor) for key, tensor in saved.items() if key not in own)
    del graphed
    return total


def _measure_backward(call: Call, outputs: list[torch.Tensor], parameters: list[nn.Parameter]) -> int:
    gradients = [torch.empty_like(o) if o.is_floating_point() else None for o in outputs]
    tracker = StorageTracker()
    with tracker:
        inputs, weights = call.backward(None, gradients, parameters)
    given_back = sum(_bytes(t) for t in [*inputs, *weights] if t is not None)
    return max(0, tracker.peak_bytes - given_back)


def _head_facts(model: PreTrainedModel, trace: _Trace, tokens: int, dtype: torch.dtype) -> UnitFacts:
    """The head with every token supervised: the largest it can be."""
    name = head_name(model)
    module = model.get_submodule(name)
    parameters = list(module.parameters())
    vocabulary, hidden = parameters[0].shape
    logits = Logits(model, model.forward, vocabulary)
    measured = min(tokens, 2 * chunk_tokens(vocabulary))  # the peak of two chunks is that of any number
    rows, targets = torch.arange(measured), torch.zeros(measured, dtype=torch.int64)
    states = torch.empty((tokens, hidden), dtype=dtype)
    tracker, flops = StorageTracker(), FlopCounterMode(display=False)
    with tracker:
        _, state_gradient, found = loss_with_gradients(logits, states, rows, targets, 1.0, parameters)
    with torch.no_grad(), flops:
        logits(states[:1])
    given_back = _bytes(state_gradient) + sum(map(_bytes, found))
    return UnitFacts(
        name=name,
        kind="head",
        variety=type(module).__name__,
        parameters=sum(p.numel() for p in parameters),
        weight_bytes=unit_layout(module).numel * parameters[0].element_size(),
        shares_weights_with=trace.owner(name, module),
        forward_flops=float(flops.get_total_flops() * tokens),
        output_bytes=0,
        saved_bytes=0,
        saved_matmul_bytes=0,
        forward_workspace_bytes=max(0, tracker.peak_bytes - given_back),
        backward_workspace_bytes=max(0, tracker.peak_bytes - given_back),
    )


class _ProductBytes(TorchDispatchMode):
    """Adds up the outputs of matrix products and of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self.bytes += sum(map(padded_bytes, output_tensors(result)))
        return result


def _cpu_attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _grouped_product_flops(rows: Any, experts: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Experts' products: each row (N, K) meets the one matrix (of E, K, M) that its offset belongs to."""
    return 2 * int(math.prod(rows)) * int(experts[-1])


_FLOP_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention_flops,
    torch.ops.aten._grouped_mm: _grouped_product_flops,
}


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
