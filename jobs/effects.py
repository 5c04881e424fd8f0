"""What a unit's call does beside returning something, as part of what it returns.

A unit may put entries into a dict or list among its arguments (keys and values for later layers), and the library's own
hooks may collect tensors inside it (router logits). Both would be lost where the unit runs without a graph, and done
twice where it runs twice. So the unit runs on copies, and its effects come back as outputs. In the same way, loose
parameters (see `structure`) come in as arguments, so that they get a gradient.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_unflatten
from transformers.utils import output_capturing

from .replay import Call

_collector = output_capturing._active_collector
_DICTS = (dict, UserDict)
_OF_THE_CALL_ITSELF = "hidden_states"
"""The one capture that hooks on the unit itself make: they see what the stand-in returns."""


class Outcome(NamedTuple):
    """What a unit returned, and its effects."""

    output: Any
    captured: dict[str, list[Any]]
    """What hooks collected inside, by the key of the collector."""
    changed: list[dict[Any, Any]]
    """For each dict or list among the arguments, the entries that are new or other than before."""


class Places:
    """Where a module, and those inside it, hold loose parameters."""

    def __init__(self, module: nn.Module, loose: Mapping[str, nn.Parameter]) -> None:
        names = {id(parameter): name for name, parameter in loose.items()}
        self._places = [
            (inner, name, names[id(parameter)])
            for inner in module.modules()
            for name, parameter in inner._parameters.items()
            if parameter is not None and id(parameter) in names
        ]
        self.names = tuple(dict.fromkeys(key for _, _, key in self._places))

    @contextmanager
    def holding(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Let the modules read these tensors instead."""
        before = [inner._parameters[name] for inner, name, _ in self._places]
        for inner, name, key in self._places:
            inner._parameters[name] = tensors[key]  # type: ignore[assignment]
        try:
            yield
        finally:
            for (inner, name, _), old in zip(self._places, before, strict=True):
                inner._parameters[name] = old


def unit_call(
    places: Places, forward: Callable[..., Any], loose: Mapping[str, torch.Tensor], args: Any, kwargs: Any
) -> Call:
    """The call of a unit, with its effects among its outputs and loose parameters among its arguments.

    Raises ProgramError for a key-value cache among the arguments.
    """

    def run(*args: Any, _loose: tuple[torch.Tensor, ...], **kwargs: Any) -> Any:
        with places.holding(dict(zip(places.names, _loose, strict=True))):
            return forward(*args, **kwargs)

    return Call.of(WithEffects(run), args, {**kwargs, "_loose": tuple(loose[name] for name in places.names)})


class WithEffects:
    """Runs a unit so that its effects are part of what it returns; equal in a second run, whenever that comes."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._keys = wanted()

    def __call__(self, *args: Any, **kwargs: Any) -> Outcome:
        containers = list(_containers((*args, *kwargs.values())))
        before = [dict(_entries(container)) for container in containers]
        with _collecting(self._keys) as captured:
            output = self._run(*args, **kwargs)
        changed = [
            {key: value for key, value in _entries(container).items() if key not in old or old[key] is not value}
            for container, old in zip(containers, before, strict=True)
        ]
        return Outcome(output, captured, changed)


def wanted() -> list[str]:
    """What hooks collect inside units at present."""
    return [key for key in (_collector.get() or ()) if key != _OF_THE_CALL_ITSELF and key[0] != "_"]


def apply(outcome: Outcome, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do to the caller's arguments and collector what the unit did to its copies; the unit's own output."""
    for container, changes in zip(_containers((*args, *kwargs.values())), outcome.changed, strict=True):
        for key, value in changes.items():
            if isinstance(container, list) and key == len(container):
                container.append(value)
            else:
                container[key] = value
    collected = _collector.get() or {}
    for key, values in outcome.captured.items():
        collected[key].extend(values)
    return outcome.output


def has_containers(call: Call) -> bool:
    """Whether a unit is given dicts or lists, which it may change."""
    args, kwargs = tree_unflatten(call.leaves, call.spec)
    return any(True for _ in _containers((*args, *kwargs.values())))


@contextmanager
def _collecting(keys: list[str]) -> Iterator[dict[str, list[Any]]]:
    captured: dict[str, list[Any]] = {key: [] for key in keys}
    token = _collector.set(captured or None)
    try:
        yield captured
    finally:
        _collector.reset(token)


def _containers(value: Any) -> Iterator[Any]:
    """Dicts and lists inside ``value``, at any depth, in a fixed order."""
    inner = value.values() if isinstance(value, _DICTS) else value if isinstance(value, (tuple, list)) else ()
    for part in list(inner):
        if type(part) in (dict, list) or isinstance(part, UserDict):
            yield part
        yield from _containers(part)


def _entries(container: Any) -> Mapping[Any, Any]:
    return container if isinstance(container, _DICTS) else dict(enumerate(container))
