"""Working memory of a layer that keeps something from its forward to its backward, measured on fake tensors.

What is kept is held in the forward and freed bit by bit in the backward, as the executor does it (its ``internals``
need real memory, where there are only shapes here).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .layout import flat_bytes
from .memory import StorageTracker
from .replay import PRODUCTS, Call, Graphed, output_tensors

Workspaces = tuple[int, int]
"""Bytes of a forward and of a backward, beyond what is kept, returned and given back."""


def keeping_products(
    call: Call, gradients: Sequence[torch.Tensor | None], parameters: Sequence[nn.Parameter], kept_bytes: int
) -> Workspaces:
    """When outputs of matrix products and of attention are kept."""
    tracker, held = StorageTracker(), _Holding()
    with tracker, held, torch.no_grad():
        output = call.forward()
    forward = tracker.peak_bytes - _bytes(output_tensors(output)) - kept_bytes
    del output
    return forward, _backward(tracker, call, _Handing(held.results), call.forward_with_graph, gradients, parameters) - (
        kept_bytes
    )


def keeping_all(
    call: Call, gradients: Sequence[torch.Tensor | None], parameters: Sequence[nn.Parameter], kept_bytes: int
) -> Workspaces:
    """When everything that autograd saves is kept."""
    tracker = StorageTracker()
    with tracker:
        graphed = call.forward_with_graph()
        forward = tracker.peak_bytes - _bytes(output_tensors(graphed.output)) - kept_bytes
        graphed.drop_values()
    runs = [graphed]
    del graphed
    return forward, _backward(tracker, call, _Nothing(), runs.pop, gradients, parameters) - kept_bytes


def _backward(
    tracker: StorageTracker,
    call: Call,
    mode: AbstractContextManager[object],
    run: Callable[[], Graphed],
    gradients: Sequence[torch.Tensor | None],
    parameters: Sequence[nn.Parameter],
) -> int:
    """Peak of a backward, beyond the gradients that it gives back."""
    with tracker:
        tracker.reset_peak()
        with mode:
            graphed = run()
        inputs, weights = call.differentiate(graphed, gradients, parameters)
    del weights
    return tracker.peak_bytes - given_back_bytes(call, inputs, parameters)


def given_back_bytes(call: Call, inputs: Sequence[torch.Tensor | None], parameters: Sequence[nn.Parameter]) -> int:
    """Bytes that a program holds for the gradients that a unit's backward gives back.

    Those of parameters are held whole, also where the unit does not use some of them and there is less.
    """
    handed_on = [gradient for gradient in call.handed_on(inputs) if gradient is not None]
    return _bytes(handed_on) + flat_bytes([parameter for parameter in parameters if parameter.requires_grad])


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class _Nothing(AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        pass


class _Holding(TorchDispatchMode):
    """Holds what products return; a copy, where the layer writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for declared, value in zip(func._schema.arguments, args, strict=False):
                if declared.is_write and isinstance(value, torch.Tensor):
                    self._save(value)
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self.results.append(tree_map_only(torch.Tensor, torch.Tensor.detach, result))
        return result

    def _save(self, written: torch.Tensor) -> None:
        storage = written.untyped_storage()

        def copied(held: torch.Tensor) -> torch.Tensor:
            return held.clone() if held.untyped_storage() is storage else held

        self.results = [tree_map_only(torch.Tensor, copied, result) for result in self.results]


class _Handing(TorchDispatchMode):
    """Hands them out again, in order, and holds each no longer than that."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__()
        self._results = results[::-1]
        results.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._results.pop() if func in PRODUCTS else func(*args, **(kwargs or {}))
