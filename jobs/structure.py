"""Which parts of a model are its units, found by watching one forward pass on fake tensors.

A unit is a module that is called as a whole: an element of the list of layers, or the outermost module with parameters
of its own elsewhere. A parameter that is used outside its unit's call (a matrix that another module reads, a vector
that the model itself holds, a tie between parts of two units) is **loose**: it stays on the device through the step.
Modules that a forward of text does not reach are idle. No family is known by name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from .errors import ModelError

LOOSE = "loose"
"""Name of the unit that holds the loose parameters."""
MAX_PASSES = 8


@dataclass(frozen=True)
class Structure:
    """The units of a model."""

    modules: dict[str, nn.Module]
    """Units by their path, in the order of their first call; the loose parameters are no part of it."""
    calls: tuple[str, ...]
    """Units in the order of the forward pass: paths, with ``#`` and a number from a module's second call on."""
    layers: str
    """Path of the list of layers."""
    loose: dict[str, nn.Parameter]
    """Loose parameters by name."""


def path_of(unit: str) -> str:
    """Path of the module of a unit: later calls of a module are units of their own, named ``path#2`` and so on."""
    return unit.partition("#")[0]


def own_parameters(module: nn.Module, loose: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The module's parameters by name, without the loose ones."""
    apart = {id(parameter) for parameter in loose.values()}
    return {name: p for name, p in module.named_parameters() if id(p) not in apart}


def find_structure(model: PreTrainedModel, forward: Callable[[], Any]) -> Structure:
    """Watch ``forward`` until every parameter it reads is in a unit or loose. Raises ModelError, with the reason."""
    layers = _layer_list(model, forward)
    candidates = _distinct(dict(_outermost(model, "", layers)))
    loose: dict[str, nn.Parameter] = {}
    for _ in range(MAX_PASSES):
        watch = _Watch(model, candidates, list(loose.values()))
        with watch:
            forward()
        if not any(path.startswith(f"{layers}.") for path in watch.calls):
            raise _no_layers(model)
        split = {path for path in watch.strays_in() if path not in watch.calls and list(candidates[path].children())}
        strays = watch.strays(split, model)
        if not split and not strays:
            modules = {path: candidates[path] for path in dict.fromkeys(watch.calls)}
            loose |= _partly_shared(model, modules, loose)
            modules = {path: m for path, m in modules.items() if own_parameters(m, loose)}
            calls = _numbered([path for path in watch.calls if path in modules])
            return Structure(modules, calls, layers, loose)
        loose |= strays
        for path in split:
            candidates |= _outermost(candidates.pop(path), path, layers)
    raise ModelError(f"the parts of {type(model).__name__} could not be told apart", hint="it cannot be streamed")


def _layer_list(model: nn.Module, forward: Callable[[], Any]) -> str:
    """Path of the outermost list that has most elements which are called; where there is one, it needs no watching."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    outer = {name: m for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    if len(outer) == 1:
        only: str = next(iter(outer))
        return only
    elements = {f"{name}.{i}": module for name, m in outer.items() for i, module in enumerate(m)}
    watch = _Watch(model, _distinct(elements))
    with watch:
        forward()
    called = Counter(path.rpartition(".")[0] for path in watch.calls)
    if not called:
        raise _no_layers(model)
    return max(called, key=lambda name: (called[name], sum(p.numel() for p in outer[name].parameters())))


def _no_layers(model: nn.Module) -> ModelError:
    return ModelError(
        f"{type(model).__name__} has no list of layers that run one after the other",
        hint="only decoder models whose layers are in a list can be streamed",
    )


def _distinct(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Each module once, under its first path."""
    first = {id(module): (path, module) for path, module in reversed(modules.items())}
    return dict(first.values())


def _outermost(module: nn.Module, path: str, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules that can be units: with parameters of their own, or elements of a list; none inside another."""
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        if next(child.parameters(), None) is None:
            continue
        holds_layers = layers == full or layers.startswith(f"{full}.")
        own = next(child.parameters(recurse=False), None) is not None
        if not holds_layers and (own or isinstance(module, nn.ModuleList)):
            yield full, child
        else:
            yield from _outermost(child, full, layers)


def _numbered(paths: list[str]) -> tuple[str, ...]:
    seen: Counter[str] = Counter()
    units = []
    for path in paths:
        seen[path] += 1
        units.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return tuple(units)


def _partly_shared(
    model: nn.Module, modules: dict[str, nn.Module], loose: dict[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    """Parameters of units that have some in common, but not all and in the same places."""
    contents: dict[str, list[tuple[str, int]]] = {
        path: [(name, id(p)) for name, p in own_parameters(module, loose).items()] for path, module in modules.items()
    }
    users: dict[int, list[str]] = defaultdict(list)
    for path, found in contents.items():
        for _, key in found:
            users[key].append(path)
    partly = {
        key
        for key, paths in users.items()
        if len(paths) > 1 and len({tuple(k for _, k in contents[path]) for path in paths}) > 1
    }
    return {name: p for name, p in model.named_parameters() if id(p) in partly}


class _Watch(TorchDispatchMode):
    """Notes the calls of candidates, and the parameters that are read outside the call of their candidate."""

    def __init__(self, model: nn.Module, candidates: dict[str, nn.Module], loose: Sequence[nn.Parameter] = ()) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._candidates = candidates
        self._active: list[set[int]] = []
        self._strays: set[int] = set()
        self._guarded = {_key(p) for p in model.parameters()} - {_key(p) for p in loose}
        self._names = {_key(p): name for name, p in model.named_parameters()}
        self._home: dict[int, list[str]] = defaultdict(list)
        for path, module in candidates.items():
            for parameter in module.parameters():
                self._home[_key(parameter)].append(path)

    def __enter__(self) -> _Watch:
        self._before = {path: vars(module).get("forward") for path, module in self._candidates.items()}
        for path, module in self._candidates.items():
            module.forward = self._watching(path, module, module.forward)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for path, module in self._candidates.items():
            del module.forward
            before = self._before[path]
            if before is not None:
                module.forward = before

    def strays_in(self) -> set[str]:
        """Candidates whose parameters were read outside their call."""
        return {path for key in self._strays for path in self._home.get(key, ())}

    def strays(self, but_in: set[str], model: nn.Module) -> dict[str, nn.Parameter]:
        """Parameters that were read outside any unit that could hold them."""
        return {
            name: parameter
            for name, parameter in model.named_parameters()
            if _key(parameter) in self._strays and not but_in.intersection(self._home.get(_key(parameter), ()))
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and self._is_stray(key := _key(leaf)):
                self._strays.add(key)
        if func._schema.is_mutable:
            self._check_written(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _check_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Weights are where they are loaded to while a forward runs: what it writes into them would be lost."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(given):
                name = self._names.get(_key(leaf)) if isinstance(leaf, torch.Tensor) else None
                if name is not None:
                    raise ModelError(
                        f"the forward writes into the parameter {name} ({func})",
                        hint="this architecture, configured like this, cannot be streamed",
                    )

    def _is_stray(self, key: int) -> bool:
        return key in self._guarded and not (self._active and key in self._active[-1])

    def _watching(self, path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        own = {_key(parameter) for parameter in module.parameters()}

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._active:
                self.calls.append(path)
            self._active.append(self._active[-1] if self._active else own)
            try:
                return forward(*args, **kwargs)
            finally:
                self._active.pop()

        return run


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
