"""Asking a run to stop while a step is under way: it is given up at the next layer, not at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..executor import Streamed
from ..structure import path_of


class StopRequested(Exception):
    """The run was asked to stop. Never leaves this package."""


@contextmanager
def watching(streamed: Streamed, stop: Callable[[], bool]) -> Iterator[None]:
    """Ask ``stop`` at every layer, forward and backward, in training and in evaluation; raise StopRequested."""

    def ask(*_: Any) -> None:
        if stop():
            raise StopRequested

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if isinstance(states, torch.Tensor) and states.requires_grad:
            states.register_hook(ask)

    paths = sorted({path_of(layer.name) for layer in streamed.facts.layers})
    modules = [streamed.model.get_submodule(path) for path in paths]
    hooks = [module.register_forward_pre_hook(ask) for module in modules]
    hooks += [module.register_forward_hook(after) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
