"""How fast any policy can be: a bound over all shapes, and the counts of a layer's choices at which it is reached.

Shapes are looked at in families (`loose`). The family with the least bound is split until no family could hold a policy
that is faster than the best by more than a share, or time runs out: then the least bound of all families is the
certificate, and it is one for the whole problem.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ortools.math_opt.python import mathopt

from ..costs import LINK_RATES
from .choices import Choices, Problem, Shape
from .counts import Counts, parked_sizes
from .loose import MOST_SEEN, Family, LooseTiming
from .paper import run_solver, status_of

WEIGHT_SLOTS: Final = (2, 4)
STAGING_SLOTS: Final = (1, 3)
"""Fewest and most of each that a plan uses."""
GAP: Final = 0.002
"""Where the solver may stop, as a share of the step time."""
NODES: Final = 60
"""Nodes of the search tree after which the solver stops; its bound holds all the same."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What was found of one family."""

    family: Family
    bound_s: float
    """No policy of the family is faster; infinite if none is as fast as the horizon."""
    counts: Counts | None = None


@dataclass
class Certificate:
    """The bounds of families that together hold every shape, least first."""

    families: list[tuple[float, int, Bound]] = field(default_factory=list)
    split: int = 0

    @property
    def bound_s(self) -> float:
        """No policy of any shape is faster."""
        return self.families[0][0]

    @property
    def least(self) -> Bound:
        """The family that holds the bound down."""
        return self.families[0][2]

    def add(self, bound: Bound) -> None:
        """Take a family in."""
        self.split += 1
        heapq.heappush(self.families, (bound.bound_s, self.split, bound))

    def refine(self, bound_of: Callable[[Family], Bound]) -> bool:
        """Split the family that holds the bound down; False if it is a single shape."""
        parts = _split(self.least.family)
        if not parts:
            return False
        held = heapq.heappop(self.families)[2]
        for part in parts:
            bound = bound_of(part)
            self.add(replace(bound, bound_s=max(bound.bound_s, held.bound_s)))
        return True


def all_shapes(problem: Problem) -> Family:
    """The family of every shape that fits at all."""
    facts = problem.facts
    largest = max(layer.weight_bytes for layer in facts.layers)
    room = problem.budgets.gpu_bytes - facts.side_bytes - WEIGHT_SLOTS[0] * largest
    residents = max(0, min(len(facts.layers), room // min(layer.weight_bytes for layer in facts.layers)))
    return Family(WEIGHT_SLOTS, STAGING_SLOTS, (0, residents))


def bound_of(
    problem: Problem, family: Family, *, backend: str, deadline: float, accumulation: int, thrift: float = 0.0
) -> Bound:
    """The family's bound. ``problem.horizon_s`` is the step time that its policies must beat to be of interest.

    With ``thrift`` each second that a link is busy costs so many of the step: no bound, but counts that leave links
    room for what the bound does not see.
    """
    model = mathopt.Model(name="lazytrain-bound")
    few = min(MOST_SEEN, accumulation)
    parked = min(problem.budgets.nvme_bytes, sum(parked_sizes(problem)))
    seen = replace(problem, shape=family.smallest, residents=family.residents, accumulation=few, parked_bytes=parked)
    choices = Choices(model, seen, whole=False)
    timing = LooseTiming(choices, family, accumulation)
    busy = mathopt.fast_sum(mathopt.fast_sum(timing.lasting[link]) for link in LINK_RATES)
    model.minimize(timing.step + thrift * busy if thrift else timing.step)
    result = run_solver(model, backend, max(0.05, deadline - time.monotonic()), GAP, NODES)
    if status_of(result) == "INFEASIBLE":
        return Bound(family, float("inf"))
    bound_s = max(result.dual_bound() * problem.horizon_s, parking_seconds(problem))
    if thrift:
        bound_s = 0.0
    counts = _counts(choices, result.variable_values(), family) if result.has_primal_feasible_solution() else None
    return Bound(family, bound_s, counts)


def parking_seconds(problem: Problem) -> float:
    """What state does not fit the host is read from NVMe and written back in every step."""
    profile = problem.profile
    beyond = problem.state_bytes - problem.budgets.host_bytes
    return max(0.0, beyond / min(profile.nvme_read_bytes_s, profile.nvme_write_bytes_s))


def _split(family: Family) -> list[Family]:
    """Two halves of the widest range; nothing for a single shape."""
    for name in ("residents", "weights", "staging"):
        low, high = getattr(family, name)
        if low < high:
            middle = 0 if name == "residents" and not low else (low + high) // 2
            return [replace(family, **{name: (low, middle)}), replace(family, **{name: (middle + 1, high)})]
    return []


def _counts(choices: Choices, values: dict[Any, float], family: Family) -> Counts:
    totals = {group: round(values[variable]) for group, variable in choices.totals.items()}
    kept = {group[1:]: number for group, number in totals.items() if group[0] == "kept" and number}
    shape: Shape = family.smallest
    return Counts(
        blocks={
            group[1]: number for group, number in totals.items() if group[0] == "block" and group[1] > 1 and number
        },
        away=totals.get(("away", 1), 0),
        nvme=totals.get(("nvme",), 0),
        kept=kept,
        resident=math.ceil(values[choices.residents] - 0.5) if family.residents[1] else 0,
        weight_slots=shape.weight_slots,
        staging_slots=max(shape.staging_slots, min(3, family.staging[1])),
    )
