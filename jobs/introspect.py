"""Facts of any Hugging Face decoder at one batch shape, measured on fake tensors: no weights, no GPU.

The model's own forward runs under FakeTensorMode, where tensors have shapes but no memory. Each unit it calls is
measured the way the executor will run it: forward without a graph, then again with one and backward. A storage tracker
gives peaks (equal to the byte to those of a real CPU run), saved-tensor hooks what autograd keeps, a FLOP counter the
work. Units of equal structure are measured once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .effects import Places, apply, has_containers, unit_call
from .errors import LazytrainError, ModelError
from .head_loss import Logits, chunk_tokens, forward_in_chunks, loss_with_gradients
from .layout import Layout
from .memory import StorageTracker
from .model_facts import ModelFacts, UnitFacts, UnitKind
from .replay import PRODUCTS, Call, output_tensors, padded_bytes
from .structure import LOOSE, Structure, find_structure, own_parameters, path_of

DType = Literal["float32", "bfloat16"]


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
    with FakeTensorMode(), torch.no_grad(), _refusing(config, micro_batch, sequence_length):
        model = _build(config, torch_dtype, type(model_or_config))
        _check_positions(model, sequence_length)
        structure = find_structure(model, lambda: model(**_text(2, min(8, sequence_length))))
        trace = _Trace(model, structure)
        logits = trace.run(_text(micro_batch, sequence_length))
        in_chunks = _loss_in_chunks(model, structure)
        head = trace.head_facts(micro_batch * sequence_length, logits, in_chunks=in_chunks)
    before, layers, after = trace.in_order()
    return ModelFacts(
        architecture=type(model).__name__,
        dtype=dtype,
        micro_batch=micro_batch,
        sequence_length=sequence_length,
        hidden_size=trace.hidden_size,
        vocabulary=logits.shape[-1],
        parameters=sum(unit.parameters for unit in (*before, *layers, *after, head) if not unit.shares_weights_with),
        side_bytes=trace.side_bytes,
        loose=tuple(structure.loose),
        loss="chunks" if in_chunks else "whole",
        before=before,
        layers=layers,
        after=after,
        head=head,
    )


def _text(rows: int, length: int) -> dict[str, Any]:
    """Arguments of a forward on padded text."""
    ids = torch.ones((rows, length), dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}


@contextmanager
def _refusing(config: PretrainedConfig, rows: int, length: int) -> Iterator[None]:
    """Whatever a model's code raises on fake text is the reason why it is refused."""
    try:
        yield
    except LazytrainError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"a model of {type(config).__name__} cannot run on {rows} x {length} tokens of text without weights: "
            f"{type(error).__name__}: {reason[0]}",
            hint="this architecture, configured like this, cannot be streamed",
        ) from error


def unit_layout(module: nn.Module) -> Layout:
    """Flat layout of the module's parameters, by their names inside it."""
    return Layout.of({name: tuple(parameter.shape) for name, parameter in module.named_parameters()})


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


def _build(config: PretrainedConfig, dtype: torch.dtype, kind: Any) -> PreTrainedModel:
    make = kind._from_config if issubclass(kind, PreTrainedModel) else AutoModelForCausalLM.from_config
    try:
        try:
            model: PreTrainedModel = make(config, dtype=dtype)
        except RuntimeError as error:
            if "swap" not in str(error):
                raise
            model = _build_on_meta(
                make, config, dtype
            )  # the model converts parts of itself, which fake tensors do not bear
    except ValueError as error:
        raise ModelError(
            f"{type(config).__name__} describes no causal language model that transformers knows",
            hint="only decoder-only language models can be fine-tuned here",
        ) from error
    return model.train()


def _build_on_meta(make: Callable[..., Any], config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with meta tensors, each then replaced by a fake one."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.device("meta"):
        model: PreTrainedModel = make(config, dtype=dtype)
    fakes: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = fakes.setdefault(
                    id(parameter), nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
                )
                module._parameters[name] = fake
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


def _check_positions(model: PreTrainedModel, length: int) -> None:
    """Fake tensors do not notice a position beyond a learned table of positions, so it is checked here."""
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and name.endswith(("wpe", "embed_positions", "position_embeddings"))
        if is_table and module.num_embeddings < length:
            raise ModelError(
                f"{type(model).__name__} has {module.num_embeddings} positions, the rows have {length} tokens",
                hint="set data.max_length to at most the model's positions",
            )


def _loss_in_chunks(model: PreTrainedModel, structure: Structure) -> bool:
    """Whether the head is all that follows the base model, and the model's loss is that of its logits."""
    head, base = model.get_output_embeddings(), model.base_model
    path = structure.calls[-1]
    inside = {id(module) for module in base.modules()} if base is not model else set()
    if structure.modules.get(path) is not head or type(head) is not nn.Linear or Places(head, structure.loose).names:
        return False
    if any(id(module) not in inside for name, module in structure.modules.items() if name != path):
        return False
    text = _text(2, 4)
    labels = text["input_ids"].clone()
    try:
        forward_in_chunks(model, model.forward, lambda states, labels: states.sum(), (), text, labels)
        Logits(model, model.forward, head.out_features)(torch.empty((2, head.in_features), dtype=head.weight.dtype))
    except Exception:  # whatever the model's code raises when there are no tokens: then all logits are made
        return False
    return True


@dataclass(frozen=True)
class _Known:
    """Facts of a unit, and what it returns."""

    facts: UnitFacts
    outcome: Any


class _Trace:
    """Measures every unit at the moment the model calls it."""

    def __init__(self, model: PreTrainedModel, structure: Structure) -> None:
        self.model, self.structure = model, structure
        self.side_bytes = self.hidden_size = 0
        self._tracker = StorageTracker()
        self._measured: list[UnitFacts] = []
        self._calls: Counter[str] = Counter()
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._owner_of: dict[int, str] = {}
        self._places = {path: Places(module, structure.loose) for path, module in structure.modules.items()}

    def run(self, text: dict[str, Any]) -> torch.Tensor:
        """One forward pass; its logits."""
        if self.structure.loose:
            self._measured.append(self._loose_facts())
        modules = self.structure.modules
        for path, module in modules.items():
            module.forward = self._measuring(path, module, module.forward)
        try:
            with self._tracker:
                output = self.model(**text)
        finally:
            for module in modules.values():
                del module.forward
        if tuple(unit.name for unit in self._measured if unit.name != LOOSE) != self.structure.calls[:-1]:
            raise ModelError(f"{type(self.model).__name__} calls its parts in another order for rows of another length")
        if not isinstance(getattr(output, "logits", None), torch.Tensor):
            raise ModelError(f"{type(self.model).__name__} returns no logits, so it is no causal language model")
        self.side_bytes += sum(_bytes(parameter) for parameter in self.structure.loose.values())
        logits: torch.Tensor = output.logits
        return logits

    def in_order(self) -> tuple[tuple[UnitFacts, ...], ...]:
        """What runs before the layers, the layers with all that runs between them, and what runs after them."""
        inside = [i for i, unit in enumerate(self._measured) if unit.name.startswith(f"{self.structure.layers}.")]
        if not inside:
            raise ModelError(f"{type(self.model).__name__} has no layers that run before its head")
        first, last = inside[0], inside[-1]
        kinds: list[UnitKind] = ["before" if i < first else "layer" if i <= last else "after" for i in range(last + 1)]
        kinds += ["after"] * (len(self._measured) - len(kinds))
        units = [unit.model_copy(update={"kind": kind}) for unit, kind in zip(self._measured, kinds, strict=True)]
        return tuple(units[:first]), tuple(units[first : last + 1]), tuple(units[last + 1 :])

    def owner(self, name: str, module: nn.Module) -> str:
        """Name of the earlier unit that has this unit's parameters too, or ""."""
        owners = {self._owner_of.setdefault(id(p), name) for p in self._own(module)}
        return "" if owners == {name} else owners.pop()

    def head_facts(self, tokens: int, logits: torch.Tensor, *, in_chunks: bool) -> UnitFacts:
        """The head with every token supervised: the largest it can be."""
        name = self.structure.calls[-1]
        module = self.structure.modules[path_of(name)]
        if in_chunks:
            facts = _head_facts(self.model, name, tokens)
        else:
            whole = 3 * _bytes(logits)  # the logits, their logarithms, the gradient
            facts = self._head.model_copy(
                update={
                    "kind": "head", "output_bytes": 0, "saved_bytes": 0, "saved_matmul_bytes": 0,
                    "forward_workspace_bytes": self._head.forward_workspace_bytes + _bytes(logits),
                    "backward_workspace_bytes": self._head.backward_workspace_bytes + whole,
                }
            )  # fmt: skip
        return facts.model_copy(update={"shares_weights_with": self.owner(name, module)})

    def _own(self, module: nn.Module) -> list[nn.Parameter]:
        return list(own_parameters(module, self.structure.loose).values())

    def _loose_facts(self) -> UnitFacts:
        loose = self.structure.loose
        layout = Layout.of({name: tuple(p.shape) for name, p in loose.items()})
        return UnitFacts(
            name=LOOSE,
            kind="before",
            variety=LOOSE,
            parameters=sum(p.numel() for p in loose.values()),
            weight_bytes=layout.numel * next(iter(loose.values())).element_size(),
            forward_flops=0.0,
            output_bytes=0,
            saved_bytes=0,
            saved_matmul_bytes=0,
            forward_workspace_bytes=0,
            backward_workspace_bytes=0,
        )

    def _measuring(self, path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            self._calls[path] += 1
            name = path if self._calls[path] == 1 else f"{path}#{self._calls[path]}"
            call = unit_call(self._places[path], forward, self.structure.loose, args, kwargs)
            known = self._measured_once(name, module, call)
            self._note(name, module, call, known)
            return apply(tree_map_only(torch.Tensor, torch.empty_like, known.outcome), args, kwargs)

        return run

    def _note(self, name: str, module: nn.Module, call: Call, known: _Known) -> None:
        if name == self.structure.calls[-1]:
            self._head = known.facts.model_copy(update={"name": name})
            self.hidden_size = call.leaves[call.boundary].shape[-1]
            return
        boundary = _bytes(call.leaves[call.boundary]) if call.boundary >= 0 else 0
        if any(unit.name.startswith(f"{self.structure.layers}.") for unit in self._measured) or self._is_layer(name):
            self.side_bytes = max(self.side_bytes, self._tracker.live_bytes - boundary)
        before = self._measured[-1].output_bytes if self._measured else 0
        self._measured.append(
            known.facts.model_copy(
                update={
                    "name": name,
                    "shares_weights_with": self.owner(name, module),
                    "input_bytes": 0 if boundary == before or not self._was_layer() else boundary,
                }
            )
        )

    def _is_layer(self, name: str) -> bool:
        return name.startswith(f"{self.structure.layers}.")

    def _was_layer(self) -> bool:
        return any(self._is_layer(unit.name) for unit in self._measured)

    _inside = False

    def _measured_once(self, name: str, module: nn.Module, call: Call) -> _Known:
        shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
        inputs = tuple((tuple(t.shape), t.dtype) for t in call.tensors())
        key = (_variety(module), shapes, inputs, name if has_containers(call) else "")
        if key not in self._known:
            self._inside = True
            with _untracked():
                self._known[key] = _measure(name, _variety(module), self._own(module), call)
            self._inside = False
        return self._known[key]


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


def _measure(name: str, variety: str, parameters: list[nn.Parameter], call: Call) -> _Known:
    layout = Layout.of({str(i): tuple(p.shape) for i, p in enumerate(parameters)})
    output, forward_peak, flops, products = _measure_forward(call)
    outputs = output_tensors(output)
    saved = _measure_saved(call, parameters)
    output_bytes = sum(_bytes(output) for output in outputs)
    facts = UnitFacts(
        name=name,
        kind="layer",  # until the order of all is known
        variety=variety,
        parameters=sum(p.numel() for p in parameters),
        weight_bytes=layout.numel * parameters[0].element_size(),
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


def _head_facts(model: PreTrainedModel, name: str, tokens: int) -> UnitFacts:
    """A head whose loss is made in chunks."""
    module = model.get_submodule(path_of(name))
    parameters = list(module.parameters())
    vocabulary, hidden = parameters[0].shape
    logits = Logits(model, model.forward, vocabulary)
    measured = min(tokens, 2 * chunk_tokens(vocabulary))  # the peak of two chunks is that of any number
    rows, targets = torch.arange(measured), torch.zeros(measured, dtype=torch.int64)
    states = torch.empty((tokens, hidden), dtype=parameters[0].dtype)
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


def _grouped_flops(left: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * math.prod(left) * right[-1])


@register_op_impl(
    torch.ops.aten._grouped_mm.default
)  # torch's own knows bfloat16 only, where the CPU knows float32 too
def _grouped_product(
    mode: FakeTensorMode,
    func: Any,
    left: torch.Tensor,
    right: torch.Tensor,
    offsets: Any = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    groups = (len(offsets),) if left.ndim == right.ndim == 2 else ()
    rows = left.shape[:-1] if left.ndim == right.ndim == 3 else left.shape[-2:-1]
    with mode:
        return torch.empty((*groups, *rows, right.shape[-1]), dtype=left.dtype, device=left.device)


_FLOP_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention_flops,
    torch.ops.aten._grouped_mm: _grouped_flops,
}


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
