"""Attributes of modules that are ours while a model is streamed, and the modules' own again afterwards."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ModelError, ProgramError

log = logging.getLogger(__name__)

_ABSENT = object()


class Patches:
    """Replaces attributes of module instances until `undo`."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, str, Any]] = []

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Let this one module have ``value`` as its attribute."""
        self._before.append((module, name, vars(module).get(name, _ABSENT)))
        setattr(module, name, value)

    def refuse(self, module: nn.Module, name: str, hint: str, what: str = "") -> None:
        """Let a method of this one module raise ProgramError; ``what`` is what the model cannot be then."""
        why = f"a streamed model cannot be {what}" if what else f"{name}() cannot be called while the model is streamed"

        def refused(*args: Any, **kwargs: Any) -> Any:
            raise ProgramError(why, hint=hint)

        self.set(module, name, refused)

    def undo(self) -> None:
        """Give every module its own attributes back."""
        for module, name, before in reversed(self._before):
            if before is _ABSENT:
                vars(module).pop(name, None)
            else:
                setattr(module, name, before)
        self._before.clear()


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The model of ``transformers`` inside what ``peft`` made of it. Raises ModelError if there is none."""
    base: Any = getattr(model, "get_base_model", None)
    inner = model if isinstance(model, PreTrainedModel) or base is None else base()
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(f"{type(model).__name__} is no model of transformers", hint="give stream() such a model")
    known = {id(parameter) for parameter in inner.parameters()}
    outside = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if outside:
        raise ModelError(
            f"{outside[0]} learns and is no part of the model itself",
            hint="prompt and prefix tuning cannot be streamed; adapters inside the layers (LoRA) can",
        )
    return inner


def is_streamed(model: nn.Module) -> bool:
    """Whether `patch_methods` is in force."""
    return "__deepcopy__" in vars(model)


def patch_methods(model: nn.Module, patches: Patches, zero_grad: Callable[..., None]) -> None:
    """Methods of a model that mean something else while it is streamed, or nothing."""
    inner = inner_model(model)
    for module in {id(module): module for module in (model, *inner.modules())}.values():
        if getattr(module, "gradient_checkpointing", False):
            patches.set(module, "gradient_checkpointing", False)
        patches.set(module, "_apply", _same_or_refused(module))
        for name in ("__deepcopy__", "__reduce_ex__"):
            patches.refuse(module, name, "copy or pickle it before stream(), or use save_pretrained()", "copied")
    patches.set(inner, "num_parameters", _counted(inner))
    patches.set(inner, "gradient_checkpointing_enable", _checkpointing_is_the_policy)
    for each in dict.fromkeys((model, inner)):
        patches.set(each, "zero_grad", zero_grad)
        for name in ("add_adapter", "load_adapter"):
            patches.refuse(each, name, "add adapters before stream(); for DPO give a reference model of its own")
        patches.refuse(each, "resize_token_embeddings", "resize the embeddings before stream()")


def _same_or_refused(module: nn.Module) -> Callable[..., nn.Module]:
    """``to()`` and its kin: nothing where they would change nothing, refused where they would."""

    def apply(change: Callable[[Any], Any], *args: Any, **kwargs: Any) -> nn.Module:
        with torch._C.DisableTorchFunctionSubclass():  # of parameters at rest no value is needed
            same = all(change(tensor) is tensor for tensor in (*module.parameters(), *module.buffers()))
        if same:
            return module
        raise ProgramError(
            "a streamed model stays in its dtype and where it is: to(), half(), cuda(), to_empty() would break it",
            hint="change dtype before stream(), and say there which device is to compute",
        )

    return apply


def _counted(model: PreTrainedModel) -> Callable[..., int]:
    """``num_parameters``, counted once: trainers ask in every step."""
    count = functools.cache(model.num_parameters)

    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        return int(count(only_trainable, exclude_embeddings))

    return num_parameters


def _checkpointing_is_the_policy(*args: Any, **kwargs: Any) -> None:
    log.info("gradient checkpointing is left out: the policy says what a streamed model keeps and what it runs again")
