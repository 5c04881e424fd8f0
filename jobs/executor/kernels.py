"""Faster kernels for a model's layers, on request: torch.compile, and Liger's fused ones."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from ..errors import InputError, ProgramError
from ..model_facts import ModelFacts
from ..policy import Policy
from ..structure import path_of


def compile_layers(model: PreTrainedModel, facts: ModelFacts, policy: Policy, backend: str) -> None:
    """Compile the forward of every layer; layers of equal code share what is compiled, two graphs for each kind.

    Costs: the first step waits for the compiler (20 s for a small Llama-like layer on one core), results differ by
    rounding (gradients by 1e-6 in float32 on the CPU), and what a layer allocates inside is no longer counted on CPU
    devices; the program's peaks remain those of the layer as it is written. Raises ProgramError for what compilation
    would make wrong.
    """
    products = [layer.index for layer in policy.layers if layer.internals == "matmuls"]
    if products:
        raise ProgramError(
            f"layers {products} keep their products, which are not seen in a compiled layer",
            hint="plan with internals none or all, or leave out compile",
        )
    random = _dropout(model)
    if random:
        raise ProgramError(
            f"the layers are compiled and drop activations ({random}): the forward and its repetition in backward are "
            "compiled apart, and would drop different ones",
            hint=f"set {random} to 0 in the model's configuration, or leave out compile",
        )
    for unit in facts.layers:
        layer = model.get_submodule(path_of(unit.name))
        layer.forward = compiled(layer.forward, backend)


def compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """``forward`` compiled for each shape it meets; the modes that count memory are off inside, or they would be
    compiled too."""
    inner: Callable[..., Any] = torch.compile(forward, backend=backend, dynamic=False)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return inner(*args, **kwargs)

    return run


def _dropout(model: PreTrainedModel) -> str:
    """The first setting by which the model drops something at random; empty if there is none."""
    for name, value in model.config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, (int, float)) and value > 0:
            return str(name)
    return ""


def apply_liger(model: PreTrainedModel, device: torch.device) -> None:
    """Give the model's layers Liger's fused norms, rotary products and gated products; the loss stays ours.

    Raises InputError where they are not installed, cannot run, or do not know the model.
    """
    if device.type != "cuda":
        raise InputError(f"Liger's kernels run on a GPU, not on {device.type}", hint="leave out liger")
    try:
        patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise InputError(
            f"Liger's kernels are not installed: {error}", hint="pip install liger-kernel, or leave out liger"
        ) from error
    kind = model.config.model_type
    if kind not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise InputError(f"Liger has no kernels for {kind} models", hint="leave out liger")
    patches._apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
