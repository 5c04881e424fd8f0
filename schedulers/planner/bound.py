"""How fast any policy can be: a bound over all shapes, and the counts of a layer's choices at which it is reached.

Policies are looked at in families (`loose`): ranges of slots, of resident layers, of boundaries on NVMe, of blocks that
recompute. Families that together hold every policy make a certificate: their least bound is one for the whole problem.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Final

from ...jobs.policy.parked import RING
from ..costs import backward_forwards, forward_seconds
from .choices import Choices
from .counts import Counts
from .linear import Model, Variable, fast_sum
from .loose import Family, LooseTiming
from .parking import most_spared_bytes, parkable
from .problem import FEW_LAYERS, Problem
from .solver import MODEL_WORK, PARTS_WORK, WHOLE_WORK, Answer, SolverFailed, run_solver, work_of

WEIGHT_SLOTS: Final = (2, 4)
STAGING_SLOTS: Final = (1, 3)
"""Fewest and most of each that a plan uses."""
GAP: Final = 0.002
"""Where the solver may stop, as a share of the step time."""
FAR: Final = 0.012
"""Share of the horizon that whole numbers of layers may add to a bound; they seldom add as much."""
NODES: Final = 12
"""Nodes of the search tree after which the solver stops; its bound holds all the same."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What was found of one family."""

    family: Family
    bound_s: float
    """No policy of the family is faster; the problem's horizon if none is as fast as that."""
    counts: Counts | None = None
    work: int = 0
    """As in `solver.work_of`."""
    whole: bool = False
    """Whether layers were not allowed to choose in parts."""


@dataclass
class Certificate:
    """The bounds of families that together hold every policy, least first."""

    families: list[tuple[float, int, Bound]] = field(default_factory=list)
    closed: list[tuple[float, int, Bound]] = field(default_factory=list)
    """Families at which nobody can look more closely."""
    solved: int = 0

    @property
    def bound_s(self) -> float:
        """No policy is faster; infinite where no family is known."""
        return min(self.open_s, *(entry[0] for entry in self.closed), math.inf)

    @property
    def open_s(self) -> float:
        """No policy is faster of the families that are not closed."""
        return self.families[0][0] if self.families else math.inf

    def add(self, bound: Bound) -> None:
        """Take a family in."""
        self.solved += 1
        heapq.heappush(self.families, (bound.bound_s, self.solved, bound))

    @property
    def least_counted(self) -> Bound | None:
        """The least bound of those that say at which choices."""
        counted = [entry for entry in self.families + self.closed if entry[2].counts]
        return min(counted, key=itemgetter(0, 1))[2] if counted else None

    def take(self) -> Bound:
        """Take out the family that holds the bound down: it is to be replaced by its parts, or a better bound."""
        return heapq.heappop(self.families)[2]

    def close(self, bound: Bound) -> None:
        """Put back a family that was taken out, for which there is nothing better."""
        self.closed.append((bound.bound_s, self.solved, bound))


def families_of(problem: Problem) -> Iterator[Family]:
    """Families that together hold every policy that could be the fastest; the first is where it most often is."""
    layers, has_nvme = len(problem.facts.layers), bool(problem.budgets.nvme_bytes)
    largest = max(layer.weight_bytes for layer in problem.facts.layers)
    room = problem.budgets.gpu_bytes - problem.facts.side_bytes - WEIGHT_SLOTS[0] * largest
    most = max(0, min(layers, room // min(layer.weight_bytes for layer in problem.facts.layers)))
    must_park = has_nvme and problem.state_bytes > problem.budgets.host_bytes
    plain = Family(WEIGHT_SLOTS, STAGING_SLOTS, parked=(int(must_park),) * 2)
    yield plain
    if most:
        yield replace(plain, residents=(1, most))
    if has_nvme:
        yield replace(plain, residents=(0, most), nvme=(1, layers))
    if has_nvme and not must_park:
        yield replace(plain, residents=(0, most), nvme=(0, layers), parked=(1, 1))
    if min(layers, problem.longest_block) > 1:
        nvme = (0, layers if has_nvme else 0)
        parked = (int(must_park), int(has_nvme))
        yield replace(plain, residents=(0, most), nvme=nvme, blocks=(1, layers), parked=parked)


def parts_of(family: Family) -> list[Family]:
    """Parts that together are the family; none of one whose members have as many of everything.

    Those with the most staging slots and those with fewer, which seldom are fast; or else each number of weight slots;
    or else those without resident layers and those with any, or halves of these.
    """
    (few, many), (low, high) = family.weights, family.staging
    if low < high:
        return [replace(family, staging=(low, high - 1)), replace(family, staging=(high, high))]
    if few < many:
        return [replace(family, weights=(slots, slots)) for slots in range(few, many + 1)]
    low, high = family.residents
    if low == high:
        return []
    middle = (low + high) // 2 if low else 0
    return [replace(family, residents=part) for part in ((low, middle), (middle + 1, high))]


def within(problem: Problem, family: Family) -> Problem:
    """The problem without the choices that nobody in the family makes."""
    budgets = problem.budgets if family.nvme[1] else problem.budgets.model_copy(update={"nvme_bytes": 0})
    return replace(problem, budgets=budgets, longest_block=problem.longest_block if family.blocks[1] else 1)


def bound_of(
    problem: Problem,
    family: Family,
    *,
    backend: str,
    deadline: float,
    whole: bool = False,
    rough: bool = False,
    nodes: int = NODES,
) -> Bound:
    """The family's bound. ``problem.horizon_s`` is the step time that its policies must beat to be of interest.

    With ``whole`` layers do not choose in parts, which is tighter where few of them fill the GPU, and takes as long as
    an exact program: of its search tree only the root is seen. With ``rough`` not even how many layers choose what is
    whole, unless it may matter (`FAR`). When no time is left the bound is what a step computes and reads at least: a
    model of many layers takes long to make.
    """
    least_s = max(parking_seconds(problem), problem.micro_batches * compute_seconds(problem))
    if deadline <= time.monotonic():
        return Bound(family, min(least_s, problem.horizon_s), whole=whole)
    model = Model(name="lazytrain-bound")
    choices = _choices(model, problem, family, whole=whole)
    twice = len(problem.facts.layers) <= FEW_LAYERS
    ask = partial(run_solver, model, backend, max(0.05, deadline - time.monotonic()), GAP, twice=twice)
    try:
        answer, work = _rough_answer(ask, model) if rough else (None, 0)
        if answer is None:
            answer = ask(1 if whole else nodes, quick=whole, only_bound=rough)
            work += work_of(answer, model, WHOLE_WORK if whole else 1)
    except SolverFailed:
        return Bound(family, min(least_s, problem.horizon_s), work=MODEL_WORK, whole=whole)
    if answer.status == "INFEASIBLE":
        return Bound(family, problem.horizon_s, work=work, whole=whole)
    bound_s = max(answer.bound * problem.horizon_s, least_s)
    counts = _counts(choices, answer.values, family) if answer.values is not None and not whole else None
    return Bound(family, bound_s, counts, work, whole)


def _choices(model: Model, problem: Problem, family: Family, *, whole: bool) -> Choices:
    """What the family chooses, in a model of its least times."""
    seen = replace(
        within(problem, family),
        shape=family.smallest,
        residents=family.residents,
        parked_bytes=_parked_bytes(problem) if family.parked[1] else 0,
    )
    choices = Choices(model, seen, whole=whole)
    timing = LooseTiming(choices, family)
    _demand(model, choices, family)
    model.minimize(timing.step)
    return choices


def _rough_answer(ask: Callable[[], Answer], model: Model) -> tuple[Answer | None, int]:
    """The answer with nothing whole, unless whole numbers may lift it above the horizon; the work that it took."""
    with model.in_parts():
        answer = ask()
    settled = answer.status == "INFEASIBLE" or answer.bound < 1 - FAR
    return answer if settled else None, work_of(answer, model, PARTS_WORK)


def _demand(model: Model, choices: Choices, family: Family) -> None:
    """What every member of the family has at least one of."""
    if family.blocks[0]:
        model.add_linear_constraint(choices.number(lambda group: group[0] == "block" and group[1] > 1) >= 1)
    if family.nvme[0]:
        model.add_linear_constraint(choices.number(lambda group: group == ("nvme",)) >= 1)
    if family.parked[0] and choices.parked:  # fewer only fill their buffers
        layers = fast_sum(part.moved * (1 / part.least) for part in choices.parked)
        model.add_linear_constraint(layers >= RING + 1)


def _parked_bytes(problem: Problem) -> int:
    """The most host memory that optimizer state on NVMe could give back."""
    sizes = parkable(problem.facts, problem.optimizer, problem.accumulation)
    return min(problem.budgets.nvme_bytes, most_spared_bytes(sizes))


def compute_seconds(problem: Problem) -> float:
    """What layers and head compute in a micro-batch when nothing runs twice: known where the solver has no time too."""
    facts, profile = problem.facts, problem.profile
    return sum(
        (1 + backward_forwards(unit, profile)) * forward_seconds(unit, facts, profile)
        for unit in (*facts.layers, facts.head)
    )


def parking_seconds(problem: Problem) -> float:
    """What state does not fit the host is read from NVMe and written back in every step."""
    profile = problem.profile
    beyond = problem.state_bytes - problem.budgets.host_bytes
    return max(0.0, beyond / min(profile.nvme_read_bytes_s, profile.nvme_write_bytes_s))


def _counts(choices: Choices, values: Sequence[float], family: Family) -> Counts:
    totals = {group: round(values[variable.id]) for group, variable in choices.totals.items()}
    residents = choices.residents
    return Counts(
        blocks={
            group[1]: number for group, number in totals.items() if group[0] == "block" and group[1] > 1 and number
        },
        nvme=totals.get(("nvme",), 0),
        kept={group[1:]: number for group, number in totals.items() if group[0] == "kept" and number},
        resident=math.ceil(values[residents.id] - 0.5) if isinstance(residents, Variable) else 0,
        parked_bytes=round(sum(values[part.spared.id] for part in choices.parked) * choices.unit),
    )
