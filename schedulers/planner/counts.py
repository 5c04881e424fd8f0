"""A policy as how many layers do what: what a bound says, and what equal layers make of a policy."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ...jobs.model_facts import ModelFacts
from ...jobs.policy import Policy
from .problem import sorts_of
from .variables import Kept

T = TypeVar("T")
Key = tuple[int, Kept, Literal["gpu", "host"]]
"""Sort of layer, what is kept of it, and where."""


@dataclass(frozen=True)
class Counts:
    """How many layers do what."""

    blocks: dict[int, int] = field(default_factory=dict)
    """Number of blocks of 2, 3, ... layers; the other layers are blocks of their own."""
    nvme: int = 0
    """Boundaries on NVMe."""
    kept: dict[Key, int] = field(default_factory=dict)
    resident: int = 0
    parked_bytes: int = 0
    """Host memory that optimizer state and gradients on NVMe give back."""

    @property
    def longest_block(self) -> int:
        """Layers of the longest block."""
        return max(self.blocks, default=1)


def count(policy: Policy, facts: ModelFacts) -> Counts:
    """The counts of a policy."""
    sorts, homes = sorts_of(facts), policy.homes
    marks = [i for i, home in enumerate(homes) if home != "recompute"]
    lengths = Counter(end - start for start, end in itertools.pairwise(marks))
    kept = Counter(
        (sorts[x.index], x.internals, x.internals_home) for x in policy.layers if x.internals != "none"
    )  # fmt: skip
    return Counts(
        blocks={length: number for length, number in sorted(lengths.items()) if length > 1},
        nvme=homes.count("nvme"),
        kept={key: kept[key] for key in sorted(kept)},
        resident=sum(layer.resident for layer in policy.layers),
    )


def spread(things: Sequence[T], number: int) -> list[T]:
    """``number`` of the things, evenly spread."""
    return [things[int((k + 0.5) * len(things) / number)] for k in range(number)]
