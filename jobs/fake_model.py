"""A model on fake tensors, which have shapes but no memory: what facts are measured on."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .errors import LazytrainError, ModelError
from .foreign import FOREIGN, words_of
from .units import MOST_LAYERS

_EXPANDED = ("mxfp4",)
"""Formats that transformers turns into bfloat16 exactly."""
_MOST = {"num_hidden_layers": MOST_LAYERS, "hidden_size": 1 << 24, "vocab_size": 1 << 31}
"""Sizes beyond which a number is a slip, and making the model might take hours."""


def config_of(source: PreTrainedModel | PretrainedConfig | dict[str, Any]) -> PretrainedConfig:
    """The configuration of whatever describes a model. Raises ModelError."""
    if isinstance(source, PreTrainedModel):
        return source.config
    config = source if isinstance(source, PretrainedConfig) else _known(source)
    is_expanded(config)
    return config


def is_expanded(config: PretrainedConfig) -> bool:
    """Whether the model is published in 4 bits and trained from all the 16 that it is expanded to when it is loaded.

    Raises ModelError for a model in a quantised format that has no exact expansion to train from.
    """
    section = getattr(config, "quantization_config", None) or {}
    method = section.get("quant_method") if isinstance(section, dict) else getattr(section, "quant_method", section)
    name = str(getattr(method, "value", method or ""))
    if name in _EXPANDED or not section:
        return bool(section)
    raise ModelError(
        f"the model is quantised ({name or 'in an unnamed format'}): such weights cannot be trained",
        hint="name the model that it was made from, whose config.json has no quantization_config",
    )


def _known(settings: dict[str, Any]) -> PretrainedConfig:
    known = dict(settings)
    _check_type(known.get("model_type"))
    try:
        config: PretrainedConfig = AutoConfig.for_model(known.pop("model_type"), **known)
    except FOREIGN as error:
        raise ModelError(
            f"not a known model configuration: {words_of(error)}",
            hint="it needs a model_type, and values that belong together",
        ) from error
    return config


def _check_type(named: object) -> None:
    if isinstance(named, str) and named not in CONFIG_MAPPING:
        near = difflib.get_close_matches(named, CONFIG_MAPPING.keys(), n=3)
        raise ModelError(
            f"transformers {version('transformers')} knows no model_type {named!r}",
            hint=f"nearest: {', '.join(near)}" if near else "is its config.json right, and transformers new enough?",
        )


def build(source: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model that a model, a configuration or a configuration dict describes, in training mode. Raises ModelError.

    Of a model, what is frozen is frozen, and what was put into it (adapters) is there.
    """
    config = config_of(source)
    if not isinstance(source, PreTrainedModel):
        return _build(config, dtype, AutoModelForCausalLM.from_config)
    model = _build(config, dtype, type(source)._from_config)
    if _shapes(model) != _shapes(source):
        return _copy(source, dtype)
    for name, parameter in source.named_parameters():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    return model


def meta_model(source: PretrainedConfig | dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """The model of a configuration on the device ``meta``: shapes only, to put adapters into. Raises ModelError."""
    with torch.device("meta"):
        return build(source, dtype)


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same modules with fake parameters and buffers."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        made = torch.empty(parameter.shape, dtype=dtype)
        memo[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    copied: PreTrainedModel = copy.deepcopy(model, memo)
    return copied.train()


def _check_sizes(config: PretrainedConfig) -> None:
    text = config.get_text_config(decoder=True)
    for name, most in _MOST.items():
        size = getattr(text, name, None)
        if isinstance(size, int) and not 1 <= size <= most:
            raise ModelError(f"the model's {name} is {size:,}", hint=f"in its config.json it is from 1 to {most:,}")


def _build(config: PretrainedConfig, dtype: torch.dtype, make: Callable[..., Any]) -> PreTrainedModel:
    _check_sizes(config)
    try:
        try:
            model = _build_on_meta(make, config, dtype)
        except RuntimeError:  # it reads values of what it makes, and small fake tensors know theirs
            model = make(config, dtype=dtype)
    except ValueError as error:
        if "nrecognized configuration class" not in str(error):
            raise
        raise ModelError(
            f"{type(config).__name__} describes no causal language model that transformers knows",
            hint="only decoder-only language models can be fine-tuned here",
        ) from error
    return model.train()


def _build_on_meta(make: Callable[..., Any], config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with meta tensors, which nobody fills with random numbers, each then replaced by a fake one."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.device("meta"):
        model: PreTrainedModel = make(config, dtype=dtype)
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            fakes[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        return fakes[id(tensor)]

    for module in model.modules():
        for places in (module._parameters, module._buffers, vars(module)):
            for name, held in places.items():
                if isinstance(held, torch.Tensor):
                    places[name] = fake(held)
    return model


def text_batch(model: PreTrainedModel, rows: int, length: int) -> dict[str, Any]:
    """Arguments of a forward on padded text, each row with positions of its own, as rows that share a sequence have."""
    ids = torch.ones((rows, length), dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:
        batch["position_ids"] = torch.arange(length).repeat(rows, 1)
    return batch


def positions_of(config: PretrainedConfig) -> int | None:
    """Tokens of the longest row that the model is for, whatever its configuration calls them; None if it does not say.

    A model whose positions are rotations runs at longer rows too.
    """
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def check_positions(model: PreTrainedModel, length: int) -> None:
    """Fake tensors do not notice a position beyond a learned table of positions, so it is checked here.

    Raises ModelError. A table may have rows that are no positions (OPT's first two), so the configuration counts too.
    """
    stated = positions_of(model.config)
    for name, module in model.named_modules():
        if not (isinstance(module, nn.Embedding) and name.endswith(("wpe", "embed_positions", "position_embeddings"))):
            continue
        positions = min(module.num_embeddings, stated or module.num_embeddings)
        if positions < length:
            raise ModelError(
                f"{type(model).__name__} has {positions} positions, the rows have {length} tokens",
                hint="set data.max_length to at most the model's positions",
            )


@contextmanager
def refusing(config: PretrainedConfig, rows: int, length: int) -> Iterator[None]:
    """Whatever a model's code raises on fake text is the reason why it is refused."""
    try:
        yield
    except LazytrainError:
        raise
    except Exception as error:
        raise ModelError(
            f"a model of {type(config).__name__} cannot run on {rows} x {length} tokens of text without weights: "
            f"{_reason(error)}",
            hint="look at the values in its config.json; where they are right, this architecture cannot be streamed",
        ) from error


def _reason(error: Exception) -> str:
    """On one line. Where a number out of a tensor decides how the code goes on, that is what is said."""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return f"its code goes on by the values of a tensor ({error.func}), and there are none before it really runs"
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
