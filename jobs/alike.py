"""Units that are alike: what one of them costs and returns the others do too, so that one of them needs to run.

Models have the same layer many times over, and running 80 of them on fake tensors takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from .effects import Places, apply, has_containers, unit_call, wanted
from .measuring import variety_of
from .replay import Call

_PLACE = re.compile(r"idx|index|layer|depth|number")
"""In the names of attributes that tell a layer which of all it is."""


class Alike:
    """Tells which units are alike, and remembers what ran. For one model: it looks at each module once."""

    def __init__(self) -> None:
        self._kinds: dict[int, tuple[Any, ...]] = {}
        self._returned: dict[tuple[Any, ...], Any] = {}

    def key(self, name: str, module: nn.Module, call: Call) -> tuple[Any, ...]:
        """What calls have in common that cost the same and return tensors of the same shapes."""
        kind, is_apart = self._kind(module)
        shapes = ((tuple(t.shape), t.dtype) for t in call.tensors())
        inputs = tuple(zip(shapes, call.needs_gradient, strict=True))
        return kind, inputs, tuple(wanted()), name if is_apart or has_containers(call) else ""

    @contextmanager
    def once_each(self, modules: Mapping[str, nn.Module], loose: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Of modules that are alike only the first ever called runs; of the others only what they return is there."""
        for path, module in modules.items():
            module.forward = self._standing_in(path, module, module.forward, Places(module, loose), loose)
        try:
            yield
        finally:
            for module in modules.values():
                del module.forward

    def _standing_in(
        self,
        path: str,
        module: nn.Module,
        forward: Callable[..., Any],
        places: Places,
        loose: Mapping[str, nn.Parameter],
    ) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            call = unit_call(places, forward, loose, args, kwargs)
            key = self.key(path, module, call)
            if key not in self._returned:
                self._returned[key] = call.forward()
            return apply(self._returned[key], args, kwargs)

        return run

    def _kind(self, module: nn.Module) -> tuple[Any, ...]:
        if id(module) not in self._kinds:
            shapes = tuple((n, tuple(p.shape), p.requires_grad) for n, p in module.named_parameters())
            self._kinds[id(module)] = (variety_of(module), shapes, _switches(module)), _refers_outside(module)
        return self._kinds[id(module)]


def _switches(module: nn.Module) -> tuple[Any, ...]:
    """What a unit's code may go by (whether it rotates positions, how wide its window is), but not its place."""
    return tuple(
        (name, value)
        for inner in module.modules()
        for name, value in vars(inner).items()
        if not name.startswith("_")
        and (value is None or isinstance(value, (bool, str)) or (isinstance(value, int) and not _PLACE.search(name)))
    )


def _refers_outside(module: nn.Module) -> bool:
    """Whether it holds modules or parameters that are not registered as its own: it may read those of another unit."""
    return any(
        isinstance(leaf, (nn.Module, nn.Parameter))
        for inner in module.modules()
        for name, value in vars(inner).items()
        if not name.startswith("_")
        for leaf in tree_leaves(value)
    )
