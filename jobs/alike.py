"""Units that are alike: what one of them costs and returns the others do too, so that one of them needs to run.

Models have the same layer many times over, and running 80 of them on fake tensors takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .effects import Places, apply, has_containers, unit_call
from .measuring import variety_of
from .replay import Call


def alike(name: str, module: nn.Module, call: Call) -> tuple[Any, ...]:
    """What calls have in common that cost the same and return tensors of the same shapes."""
    shapes = tuple((n, tuple(p.shape), p.requires_grad) for n, p in module.named_parameters())
    inputs = tuple((tuple(t.shape), t.dtype) for t in call.tensors())
    return variety_of(module), shapes, inputs, name if has_containers(call) or _refers_outside(module) else ""


@contextmanager
def once_each(modules: Mapping[str, nn.Module], loose: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Of modules that are alike only the first runs; the others return tensors of the same shapes."""
    known: dict[tuple[Any, ...], Any] = {}

    def standing_in(path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        places = Places(module, loose)

        def run(*args: Any, **kwargs: Any) -> Any:
            call = unit_call(places, forward, loose, args, kwargs)
            key = alike(path, module, call)
            if key not in known:
                known[key] = call.forward()
            return apply(tree_map_only(torch.Tensor, torch.empty_like, known[key]), args, kwargs)

        return run

    for path, module in modules.items():
        module.forward = standing_in(path, module, module.forward)
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward


def _refers_outside(module: nn.Module) -> bool:
    """Whether it holds modules or parameters that are not registered as its own: it may read those of another unit."""
    return any(
        isinstance(leaf, (nn.Module, nn.Parameter))
        for inner in module.modules()
        for name, value in vars(inner).items()
        if not name.startswith("_")
        for leaf in tree_leaves(value)
    )
