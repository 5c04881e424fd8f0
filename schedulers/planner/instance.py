"""What the paper's planning problem looks like for one model on one machine, and what a schedule costs in it.

The equations are those of the LazyTrain paper (arXiv 2608.11919). Boundaries are numbered 0..L, layers 0..L-1; a
schedule is the home of each boundary. The path of edges that the paper speaks of is implied: it visits every boundary
that is materialised, and the others are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd
from typing import Final

from ...jobs.errors import ProgramError
from ...jobs.model_facts import ModelFacts
from ...jobs.policy.artifact import Home
from ..costs import forward_seconds
from ..hardware import Budgets, HardwareProfile

LONGEST_BLOCK: Final = 8
"""Most layers that one block recomputes from its first boundary."""
TIE_BREAKER: Final = 1e-5
"""Cost of one materialised boundary, and of one on NVMe on top, in mean forward times of a layer."""
WINDOW_FORWARDS: Final = 4
"""Compute that a layer's window offers for hiding traffic, in forwards: forward, re-forward and backward."""


@dataclass(frozen=True, slots=True)
class Link:
    """One link: what it moves per second, and per window the bytes it can hide and those it must move anyway."""

    bytes_s: float
    capacity: tuple[float, ...]
    mandatory: tuple[float, ...]

    @property
    def spare(self) -> tuple[float, ...]:
        """Bytes per window that activations can use for free.

        A window whose mandatory traffic passes its capacity has none, and that excess is not charged to activations.
        """
        return tuple(max(0.0, c - m) for c, m in zip(self.capacity, self.mandatory, strict=True))


@dataclass(frozen=True, slots=True)
class Instance:
    """The numbers that the planning problem sees. Windows are one per layer; window w may carry boundaries 0..w."""

    sizes: tuple[int, ...]
    """Bytes of boundary 0..L."""
    forward_s: tuple[float, ...]
    """Seconds of one forward of layer 0..L-1."""
    budgets: Budgets
    """Bytes for boundaries in each tier."""
    d2h: Link
    h2d: Link
    nvme_write: Link
    nvme_read: Link
    longest_block: int = LONGEST_BLOCK
    materialised_s: float = 0.0
    """Tie-breaker for each materialised boundary."""
    nvme_s: float = 0.0
    """Further tie-breaker for each boundary on NVMe."""

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return len(self.forward_s)

    @property
    def links(self) -> dict[str, Link]:
        """The links by name of the stream they belong to."""
        return {"d2h": self.d2h, "h2d": self.h2d, "nvme_write": self.nvme_write, "nvme_read": self.nvme_read}

    @property
    def reachable_budgets(self) -> Budgets:
        """The budgets rounded down to what sums of boundaries can reach; equal ones make equal problems."""
        unit, total = gcd(*self.sizes), sum(self.sizes)
        rounded = {tier: min(size, total) // unit * unit for tier, size in self.budgets.by_tier().items()}
        return Budgets(gpu_bytes=rounded["gpu"], host_bytes=rounded["host"], nvme_bytes=rounded["nvme"])

    def with_budgets(self, budgets: Budgets) -> Instance:
        """The same problem with other budgets."""
        return replace(self, budgets=budgets)


def make_instance(
    facts: ModelFacts, profile: HardwareProfile, budgets: Budgets, *, longest_block: int = LONGEST_BLOCK
) -> Instance:
    """The planning problem of ``facts`` on ``profile`` with ``budgets`` for boundaries alone.

    Each window must carry its layer's gradients out once and its weights in twice, for forward and for backward.
    """
    forward_s = tuple(forward_seconds(layer, facts, profile) for layer in facts.layers)
    window_s = [WINDOW_FORWARDS * second for second in forward_s]
    weights = [float(layer.weight_bytes) for layer in facts.layers]

    def link(bytes_s: float, loads: int) -> Link:
        return Link(bytes_s, tuple(bytes_s * s for s in window_s), tuple(loads * w for w in weights))

    tie = TIE_BREAKER * sum(forward_s) / len(forward_s)
    return Instance(
        sizes=facts.boundary_bytes,
        forward_s=forward_s,
        budgets=budgets,
        d2h=link(profile.d2h_bytes_s, 1),
        h2d=link(profile.h2d_bytes_s, 2),
        nvme_write=link(profile.nvme_write_bytes_s, 0),
        nvme_read=link(profile.nvme_read_bytes_s, 0),
        longest_block=longest_block,
        materialised_s=tie,
        nvme_s=tie,
    )


@dataclass(frozen=True, slots=True)
class Price:
    """What a schedule costs beyond the work that every schedule does."""

    objective_s: float
    """The paper's objective: recomputation, exposed activation traffic, tie-breakers."""
    recompute_s: float
    exposed_s: dict[str, float]
    """Seconds of activation traffic that no window hides, per link."""
    used: Budgets
    """Bytes of boundaries in each tier."""


def price(instance: Instance, homes: Sequence[Home]) -> Price:
    """Price a schedule, whoever made it. Raises ProgramError if it is not one or passes a budget."""
    used = _check(instance, homes)
    recompute_s = sum(instance.forward_s[i - 1] for i, home in enumerate(homes) if home == "recompute")
    exposed_s = {
        name: exposed_bytes(instance, homes, ("nvme",) if name.startswith("nvme") else ("host", "nvme"), link)
        / link.bytes_s
        for name, link in instance.links.items()
    }
    materialised = len(homes) - homes.count("recompute")
    ties = instance.materialised_s * materialised + instance.nvme_s * homes.count("nvme")
    return Price(recompute_s + sum(exposed_s.values()) + ties, recompute_s, exposed_s, used)


def exposed_bytes(instance: Instance, homes: Sequence[Home], tiers: tuple[Home, ...], link: Link) -> float:
    """Least bytes of boundaries in ``tiers`` that no window of the link can hide.

    Window w carries what was released up to w, so the bytes released from some window on have only the windows from
    there to hide in; what is left over is the worst such excess (the minimum cut of that transport problem).
    """
    released = [instance.sizes[i] if homes[i] in tiers else 0.0 for i in range(instance.layers)]
    excess = [r - s for r, s in zip(released, link.spare, strict=True)]
    return max(0.0, *accumulate(reversed(excess)))


def _check(instance: Instance, homes: Sequence[Home]) -> Budgets:
    if len(homes) != instance.layers + 1 or homes[0] != "gpu" or homes[-1] != "gpu":
        raise ProgramError(f"a schedule has {instance.layers + 1} homes, the first and the last on the GPU")
    kept = [i for i, home in enumerate(homes) if home != "recompute"]
    longest = max(end - start for start, end in pairwise(kept))
    if longest > instance.longest_block:
        raise ProgramError(f"a block has {longest} layers, more than {instance.longest_block}")
    used = Budgets(
        gpu_bytes=_bytes_in(instance, homes, "gpu"),
        host_bytes=_bytes_in(instance, homes, "host"),
        nvme_bytes=_bytes_in(instance, homes, "nvme"),
    )
    available = instance.budgets.by_tier()
    for tier, need in used.by_tier().items():
        if need > available[tier]:
            raise ProgramError(
                f"the schedule keeps {need:,} bytes of boundaries on {tier}, more than {available[tier]:,}"
            )
    return used


def _bytes_in(instance: Instance, homes: Sequence[Home], tier: Home) -> int:
    return sum(size for size, home in zip(instance.sizes, homes, strict=True) if home == tier)
