"""Running one unit of a model away from the model's own graph: forward without a graph, then again with one.

The executor streams units this way and `introspect` measures them this way, so that what is measured is what will run.
"""

from __future__ import annotations

import functools
import random
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_map_only, tree_unflatten
from transformers import Cache

from .errors import ProgramError

Module = Callable[..., Any]
Gradients = tuple[list[torch.Tensor | None], list[torch.Tensor | None]]
"""Gradients of a call's tensors, and of parameters."""
_aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Operations that are dear to repeat: matrix products and attention. The rest of a layer is element-wise."""
KEPT_ALIGNMENT = 64
"""Bytes at whose multiples kept tensors start when several lie in one buffer."""


@dataclass
class Call:
    """One call of a unit: its arguments, flattened, and the state of the random generators before it."""

    run: Module
    leaves: list[Any]
    """Arguments in pytree order; the boundary's place is None while the boundary is at its home."""
    spec: TreeSpec
    boundary: int
    """Place of the boundary (the first floating-point tensor) among the leaves; -1 where there is none."""
    needs_gradient: list[bool]
    """For each tensor among the leaves, in order, whether it wants a gradient; the boundary always does."""
    autocast: Autocast
    """What autocast was when the unit was called."""
    rng: RngState | None = None
    """The generators before the unit's first run; None if it draws no random numbers."""
    kernels_follow_graph: bool = False
    """Whether `forward` must record a graph, of which nothing is kept, to run the kernels of `forward_with_graph`."""

    @classmethod
    def of(cls, run: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Flatten the arguments. Raises ProgramError for a key-value cache, which a second run would extend again."""
        leaves, spec = flatten((args, kwargs))
        if any(isinstance(leaf, Cache) for leaf in leaves):
            raise ProgramError(
                "a key-value cache cannot be used in training", hint="call the model with use_cache=False"
            )
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        floating = [i for i in places if leaves[i].is_floating_point()]
        named = [i for i in floating if leaves[i] is kwargs.get("hidden_states")]
        boundary = next(iter(named or floating), -1)
        needs_gradient = [i == boundary or leaves[i].requires_grad for i in places]
        device = leaves[boundary].device.type if boundary >= 0 else "cpu"
        return cls(run, leaves, spec, boundary, needs_gradient, Autocast.now(device))

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def beside(self) -> list[torch.Tensor]:
        """The tensors beside the boundary, and beside loose parameters, that want a gradient."""
        wanted = zip(self._places(), self.needs_gradient, strict=True)
        return [self.leaves[place] for place, needed in wanted if needed and not self._is_handed_on(place)]

    def handed_on(self, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Of the gradients of `tensors` those of the boundary and of loose parameters.

        Those of the others are added to what there is, and take memory until then.
        """
        return [gradient for place, gradient in zip(self._places(), inputs, strict=True) if self._is_handed_on(place)]

    def _places(self) -> list[int]:
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    def _is_handed_on(self, place: int) -> bool:
        return place == self.boundary or isinstance(self.leaves[place], torch.nn.Parameter)

    def forward(self, boundary: torch.Tensor | None = None) -> Any:
        """Run the unit with ``boundary`` in its place (if given); what it returns is returned as it is."""
        if self.kernels_follow_graph:
            with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _nothing_saved):
                output = self.forward_with_graph(boundary).output
            return tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        args, kwargs = tree_unflatten(self._with(boundary), self.spec)
        with self.autocast.active():
            return self.run(*args, **kwargs)

    def forward_with_graph(self, boundary: torch.Tensor | None = None) -> Graphed:
        """Run the unit on detached arguments, recording a graph."""
        leaves, inputs = self._with(boundary), []
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for place, needed in zip(places, self.needs_gradient, strict=True):
            leaves[place] = leaves[place].detach().requires_grad_(needed)
            if needed:
                inputs.append(leaves[place])
        args, kwargs = tree_unflatten(leaves, self.spec)
        with torch.enable_grad(), self.autocast.active():
            return Graphed(inputs, self.run(*args, **kwargs))

    def backward(
        self,
        boundary: torch.Tensor | None,
        output_gradients: Sequence[torch.Tensor | None],
        parameters: Sequence[torch.nn.Parameter],
    ) -> Gradients:
        """Run the unit again with a graph and differentiate it."""
        return self.differentiate(self.forward_with_graph(boundary), output_gradients, parameters)

    def differentiate(
        self,
        graphed: Graphed,
        output_gradients: Sequence[torch.Tensor | None],
        parameters: Sequence[torch.nn.Parameter],
    ) -> Gradients:
        """Gradients of ``tensors()`` (the boundary at its place) and of ``parameters``.

        ``output_gradients`` belong to the tensors among the outputs, in order. A gradient is None where none is wanted
        or the output does not depend on the tensor.
        """
        outputs = output_tensors(graphed.output)
        pairs = [(o, g) for o, g in zip(outputs, output_gradients, strict=True) if o.requires_grad and g is not None]
        wanted = [*graphed.inputs, *(p for p in parameters if p.requires_grad)]
        if not pairs or not wanted:
            return [None] * len(self.needs_gradient), [None] * len(parameters)
        found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
        of_inputs = [next(found) if needed else None for needed in self.needs_gradient]
        return of_inputs, [next(found) if p.requires_grad else None for p in parameters]

    def _with(self, boundary: torch.Tensor | None) -> list[Any]:
        leaves = list(self.leaves)
        if boundary is not None and self.boundary >= 0:
            leaves[self.boundary] = boundary
        return leaves


def _nothing_saved(_: object) -> torch.Tensor:
    raise ProgramError("a forward that was only run for its values has no backward")


@dataclass
class Graphed:
    """A run with a graph: the detached arguments that want a gradient, and what the unit returned."""

    inputs: list[torch.Tensor]
    output: Any

    def drop_values(self) -> None:
        """Free what was given and returned, as far as nothing else holds it: the graph needs shapes, not values.

        A view holds the tensor that it is a view of.
        """
        for tensor in (*self.inputs, *output_tensors(self.output)):
            for held in (tensor,) if tensor._base is None else (tensor, tensor._base):
                held.data = held.data.new_zeros(()).expand(held.shape)


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """``tree_flatten`` that looks into dictionaries of other classes too (keys and values that layers share)."""
    leaves, spec = tree_flatten(value)
    closed = {type(leaf) for leaf in leaves if isinstance(leaf, UserDict)}
    if not closed:
        return leaves, spec
    for kind in closed:
        register_pytree_node(kind, _entries_of, functools.partial(_of_entries, kind))
    return flatten(value)


def _entries_of(container: UserDict[Any, Any]) -> tuple[list[Any], list[Any]]:
    return list(container.data.values()), list(container.data)


def _of_entries(kind: type[UserDict[Any, Any]], values: Iterable[Any], keys: list[Any]) -> UserDict[Any, Any]:
    return kind(zip(keys, values, strict=True))


def output_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of whatever a unit returned: a tensor, a tuple, a ModelOutput."""
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]


def padded(size: int) -> int:
    """``size`` rounded up to the alignment of kept tensors."""
    return -(-size // KEPT_ALIGNMENT) * KEPT_ALIGNMENT


def padded_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's storage, rounded up so that what follows it in a buffer is aligned for any dtype."""
    return padded(tensor.untyped_storage().nbytes())


@dataclass(frozen=True, slots=True)
class Autocast:
    """Automatic mixed precision as it was, to be so again when a unit runs once more."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> Autocast:
        """Remember it as it is for one type of device."""
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have it so again, and keep no copy of a weight in another dtype: its memory is needed for the next layer."""
        if not self.enabled and not torch.is_autocast_enabled(self.device):
            yield
            return
        with torch.autocast(self.device, self.dtype, self.enabled, cache_enabled=False):
            yield


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """No gradients, and tensors that can still be written afterwards, also where the caller is in inference mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(frozen=True)
class RngState:
    """The random generators of the CPU, of one GPU, and those of Python and numpy, which some models use."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls, device: torch.device) -> RngState:
        """Remember the generators as they are."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, random.getstate(), numpy.random.get_state())

    def unless_unchanged(self, device: torch.device) -> RngState | None:
        """This state if some generator has moved on since; None if what ran in between drew nothing."""
        now = RngState.now(device)
        same = torch.equal(self.cpu, now.cpu) and self.python == now.python
        same = same and self.numpy[2:] == now.numpy[2:] and bool((self.numpy[1] == now.numpy[1]).all())
        if self.cuda is not None and now.cuda is not None:
            same = same and torch.equal(self.cuda, now.cuda)
        return None if same else self

    def restore(self, device: torch.device) -> None:
        """Set the generators back."""
        torch.set_rng_state(self.cpu)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)
