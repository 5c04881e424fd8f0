"""The order in which a step runs the model: its phases, each one pass over the units."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Phase(NamedTuple):
    """A forward that a backward will follow, that backward, a forward without gradients, or the norms at the end."""

    kind: Literal["forward", "backward", "evaluate", "norms"]
    micro: int = -1
    """Number of the forward in the step, from 0; a backward has that of its forward."""


NORMS = Phase("norms")
Order = tuple[Phase, ...]


def micro_batches(count: int) -> Order:
    """Forward and backward of ``count`` micro-batches in turn, then the norms."""
    pairs = [(Phase("forward", micro), Phase("backward", micro)) for micro in range(count)]
    return (*(phase for pair in pairs for phase in pair), NORMS)
