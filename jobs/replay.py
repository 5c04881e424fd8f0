"""Running one unit of a model away from the model's own graph: forward without a graph, then again with one.

The executor streams units this way and `introspect` measures them this way, so that what is measured is what will run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .errors import ProgramError

Module = Callable[..., Any]


@dataclass
class Call:
    """One call of a unit: its arguments, flattened, and the state of the random generators before it."""

    run: Module
    leaves: list[Any]
    """Arguments in pytree order; the boundary's place is None while the boundary is at its home."""
    spec: TreeSpec
    boundary: int
    """Place of the boundary (the first floating-point tensor) among the leaves; -1 where there is none."""
    rng: RngState | None = None

    @classmethod
    def of(cls, run: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Flatten the arguments. Raises ProgramError for a key-value cache, which a second run would extend again."""
        if kwargs.get("past_key_values") is not None:
            raise ProgramError(
                "a key-value cache cannot be used in training", hint="call the model with use_cache=False"
            )
        leaves, spec = tree_flatten((args, kwargs))
        floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        return cls(run, leaves, spec, floats[0] if floats else -1)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def forward(self, boundary: torch.Tensor | None = None) -> Any:
        """Run the unit with ``boundary`` in its place (if given); what it returns is returned as it is."""
        leaves = list(self.leaves)
        if boundary is not None:
            leaves[self.boundary] = boundary
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.run(*args, **kwargs)

    def backward(
        self,
        boundary: torch.Tensor | None,
        needs_gradient: Sequence[bool],
        output_gradients: Sequence[torch.Tensor | None],
        parameters: Sequence[torch.nn.Parameter],
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Run the unit again with a graph and differentiate it.

        ``needs_gradient`` says which of ``tensors()`` (the boundary at its place) want a gradient; ``output_gradients``
        belong to the tensors among the outputs, in order. Returns the gradients of those tensors and of
        ``parameters``; None where the output does not depend on them.
        """
        leaves = list(self.leaves)
        if boundary is not None:
            leaves[self.boundary] = boundary
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for place, needed in zip(places, needs_gradient, strict=True):
            leaves[place] = leaves[place].detach().requires_grad_(needed)
        inputs = [leaves[place] for place, needed in zip(places, needs_gradient, strict=True) if needed]
        args, kwargs = tree_unflatten(leaves, self.spec)
        del leaves, boundary
        with torch.enable_grad():
            outputs = output_tensors(self.run(*args, **kwargs))
        del args, kwargs
        pairs = [(o, g) for o, g in zip(outputs, output_gradients, strict=True) if o.requires_grad and g is not None]
        found = torch.autograd.grad(
            [o for o, _ in pairs], [*inputs, *parameters], [g for _, g in pairs], allow_unused=True
        )
        gradients = iter(found[: len(inputs)])
        return [next(gradients) if needed else None for needed in needs_gradient], list(found[len(inputs) :])


def output_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of whatever a unit returned: a tensor, a tuple, a ModelOutput."""
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class RngState:
    """The random generators of the CPU and of one GPU."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RngState:
        """Remember the generators as they are."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        """Set the generators back."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)
