"""What one unit of a model costs, measured on fake tensors the way the executor will run it.

Forward without a graph, then again with one and backward. A storage tracker gives peaks (equal to the byte to those of
a real CPU run), saved-tensor hooks what autograd keeps, a FLOP counter the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import nn
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import PreTrainedModel

from .head_loss import Logits, chunk_tokens, loss_with_gradients
from .keeping import given_back_bytes, keeping_all, keeping_products
from .layout import flat_bytes
from .memory import StorageTracker
from .model_facts import UnitFacts
from .replay import PRODUCTS, Call, output_tensors, padded_bytes
from .structure import path_of


@dataclass(frozen=True)
class Measured:
    """Facts of a unit, and what it returns."""

    facts: UnitFacts
    outcome: Any


@contextmanager
def untracked() -> Iterator[None]:
    """Leave the tracker of the whole model, so that measuring one unit does not count in it."""
    with torch.utils._python_dispatch._disable_current_modes() as modes:
        fake = next(mode for mode in modes if isinstance(mode, FakeTensorMode))
        with fake:
            yield


def variety_of(module: nn.Module) -> str:
    """Class of a unit, with its sort of attention where a model has several."""
    for attribute in ("layer_type", "attention_type"):
        value = getattr(module, attribute, None)
        if isinstance(value, str):
            return f"{type(module).__name__}/{value}"
    return type(module).__name__


def measure(name: str, variety: str, parameters: list[nn.Parameter], call: Call) -> Measured:
    """Facts of one call of a unit with these parameters."""
    saved, with_graph = _measure_saved(call, parameters)
    output, forward_peak, flops, products = _measure_forward(call)
    if products.kernels != with_graph:
        call.kernels_follow_graph = True
        output, forward_peak, flops, products = _measure_forward(call)
    outputs = output_tensors(output)
    output_bytes = sum(bytes_of(output) for output in outputs)
    facts = UnitFacts(
        name=name,
        kind="layer",  # until the order of all is known
        variety=variety,
        **weights_of(parameters),
        forward_flops=float(flops.get_total_flops()),
        attention_flops=float(_of_attention(flops)),
        output_bytes=output_bytes,
        saved_bytes=saved,
        saved_matmul_bytes=products.bytes,
        forward_workspace_bytes=max(0, forward_peak - output_bytes),
        backward_workspace_bytes=_measure_backward(call, outputs, parameters),
        **_keeping(call, outputs, parameters, saved, products.bytes),
        kernels_follow_graph=call.kernels_follow_graph,
    )
    return Measured(facts, output)


def _measure_forward(call: Call) -> tuple[Any, int, FlopCounterMode, _Products]:
    tracker, products = StorageTracker(), _Products()
    flops = FlopCounterMode(display=False, custom_mapping=_FLOP_FORMULAS)
    with torch.no_grad(), flops, products, tracker:
        output = call.forward()
    return output, tracker.peak_bytes, flops, products


def _of_attention(flops: FlopCounterMode) -> int:
    return sum(count for op, count in flops.get_flop_counts().get("Global", {}).items() if "attention" in str(op))


def _measure_saved(call: Call, parameters: list[nn.Parameter]) -> tuple[int, list[Any]]:
    """Bytes that a graph keeps, and the kernels that a forward with one runs."""
    own = {t.untyped_storage()._cdata for t in [*parameters, *call.tensors()]}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> Any:
        """The graph holds nothing instead: an operation that saves its own result would hold itself for good."""
        saved[tensor.untyped_storage()._cdata] = tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held), _Products() as products:
        graphed = call.forward_with_graph()
    total = sum(padded_bytes(tensor) for key, tensor in saved.items() if key not in own)
    saved.clear()  # the graph holds the hook, and with it all that was saved
    del graphed
    return total, products.kernels


class Keeping(TypedDict):
    """The fields of a unit's facts on what it needs when it keeps something."""

    keeping_matmuls_bytes: tuple[int, int]
    keeping_all_bytes: tuple[int, int]


def _keeping(
    call: Call, outputs: list[torch.Tensor], parameters: list[nn.Parameter], saved: int, products: int
) -> Keeping:
    gradients = gradients_like(outputs)
    return Keeping(
        keeping_matmuls_bytes=keeping_products(call, gradients, parameters, products),
        keeping_all_bytes=keeping_all(call, gradients, parameters, saved),
    )


def gradients_like(outputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """A gradient for each output that can have one."""
    return [torch.empty_like(o) if o.is_floating_point() else None for o in outputs]


def _measure_backward(call: Call, outputs: list[torch.Tensor], parameters: list[nn.Parameter]) -> int:
    gradients = gradients_like(outputs)
    tracker = StorageTracker()
    with tracker:
        inputs, weights = call.backward(None, gradients, parameters)
    del weights
    return max(0, tracker.peak_bytes - given_back_bytes(call, inputs, parameters))


def measure_head(model: PreTrainedModel, name: str, tokens: int) -> UnitFacts:
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
    given_back = bytes_of(state_gradient) + sum(bytes_of(gradient) for gradient in found if gradient is not None)
    return UnitFacts(
        name=name,
        kind="head",
        variety=type(module).__name__,
        **weights_of(parameters),
        forward_flops=float(flops.get_total_flops() * tokens),
        output_bytes=0,
        saved_bytes=0,
        saved_matmul_bytes=0,
        forward_workspace_bytes=max(0, tracker.peak_bytes - given_back),
        backward_workspace_bytes=max(0, tracker.peak_bytes - given_back),
    )


class _Products(TorchDispatchMode):
    """Notes matrix products and attention, and adds up their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.kernels: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self.kernels.append(func)
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


class Weights(TypedDict):
    """The fields of a unit's facts that its parameters give."""

    parameters: int
    frozen_parameters: int
    weight_bytes: int
    frozen_bytes: int


def weights_of(parameters: Sequence[nn.Parameter]) -> Weights:
    """The fields of a unit's facts that its parameters give."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    return Weights(
        parameters=sum(p.numel() for p in parameters),
        frozen_parameters=sum(p.numel() for p in frozen),
        weight_bytes=flat_bytes(parameters),
        frozen_bytes=flat_bytes(frozen),
    )


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's storage."""
    return tensor.untyped_storage().nbytes()
