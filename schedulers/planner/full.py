"""The full planner: local search with the simulator as judge, and a proof of how much faster any policy could be.

The best of the fixed rules and of the paper's plan comes first. Then `bound` says how fast any policy of any shape
(weight and staging slots, resident layers) could be, and with how many layers doing what; `climb` lays those out and
improves them. While plan and bound are further apart than the proof asks for, the bound's families of shapes are split,
each half gives a new start, and at the end the exact program of the best shape (`exact`) is asked for something faster.
Every policy is lowered, timed by the simulator and its memory checked before it counts, so the step time is the
simulator's. All work is counted in solves, nodes and simulations, not in seconds: unless the deadline comes first,
equal questions get equal answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from ...jobs.errors import DoesNotFit
from ...jobs.policy import Policy
from ..baselines import every_kth, keep_all, megatrain
from ..hardware import Budgets
from ..simulator import simulate
from .bound import Bound, Certificate, all_shapes, bound_of
from .choices import Problem, Shape
from .climb import Climb
from .counts import LAYOUTS, Counts, Key, count
from .exact import solve_exact
from .loose import Family
from .search import NoScheduleError, OutOfTimeError, Question, find

PROOF: Final = 0.008
"""Share of the step time by which no policy is proven to be faster, where the search ends."""
PAPER_SECONDS: Final = 2.0
"""Time for the paper's plan, which is a candidate too."""
ENOUGH: Final = 0.006
"""Share of the step time within which of the bound the local search ends."""
STARTS: Final = 2
"""How often families are split, each half a start for the local search."""
THRIFT: Final = (0.15, 0.03)
"""What a second on a link costs, in seconds of the step, in further starts for the local search."""
SIMULATIONS: Final = (12, 70)
"""Fewest and most policies that are simulated from each start; in between `SIMULATED_LAYERS` of them all decide."""
SIMULATED_LAYERS: Final = 2400
LONGEST_THOUGHT_S: Final = 9.0
"""Seconds after which the search ends with what it has: a limit for slow machines, where answers may differ."""
EXACT_LAYERS: Final = 36
"""Longest chain for which the exact program is solved at the end."""
EXACT_NODES: Final = 1200
"""Nodes of the solver's search tree times layers, after which the exact program is left."""
TRIES: Final = 3
"""How often the exact program is solved again with less memory before it is given up."""
MOST_MICRO_BATCHES: Final = 2
"""Micro-batches whose timing the exact program sees."""


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest policy so far."""

    policy: Policy
    step_s: float


@dataclass
class Search:
    """One search: the question, the best policy so far, what was proven, and the time spent."""

    question: Question
    climb: Climb
    begun: float = field(default_factory=time.monotonic)
    certificate: Certificate = field(default_factory=Certificate)

    @property
    def best(self) -> Best:
        """The fastest policy so far."""
        assert self.climb.policy is not None  # a rule that fits comes first
        return Best(self.climb.policy, self.climb.step_s)

    @property
    def bound_s(self) -> float | None:
        """No policy is faster; None where time ran out before anything was proven."""
        return min(self.certificate.bound_s, self.best.step_s) if self.certificate.families else None

    @property
    def proven(self) -> bool:
        """Whether no policy is faster by more than the proof asks for."""
        return self.bound_s is not None and self.bound_s >= self.best.step_s * (1 - PROOF)

    def seconds_left(self) -> float:
        """Seconds until the deadline, or until enough thought was spent."""
        return min(self.question.seconds_left(), LONGEST_THOUGHT_S - (time.monotonic() - self.begun))

    def run(self) -> None:
        """Bound and climb until the plan is proven, or nothing more is to be tried."""
        problem = self._problem(Shape())
        everything = all_shapes(problem)
        self._start(self._bound(everything))
        for thrift in THRIFT:
            if self.proven or self.seconds_left() <= 0:
                return
            self._climb_from(self._bound(everything, thrift=thrift))
        for _ in range(STARTS):
            if self.proven or self.seconds_left() <= 0 or not self.certificate.refine(self._bound_and_climb):
                break
        parked = any(layer.optimizer_home == "nvme" for layer in self.best.policy.layers)
        if not self.proven and not parked and len(self.question.facts.layers) <= EXACT_LAYERS:
            self._solve_exactly(shape_of(self.best.policy))

    def _problem(self, shape: Shape) -> Problem:
        question = self.question
        return Problem(
            question.facts,
            question.profile,
            question.budgets,
            shape,
            self.best.step_s,
            question.longest_block,
            question.accumulation,
            optimizer=question.optimizer,
        )

    # ---- bounds and starts

    def _bound(self, family: Family, *, thrift: float = 0.0) -> Bound:
        question = self.question
        return bound_of(
            self._problem(Shape()),
            family,
            backend=question.backend,
            deadline=time.monotonic() + max(0.0, self.seconds_left()),
            accumulation=question.accumulation,
            thrift=thrift,
        )

    def _start(self, bound: Bound) -> None:
        self.certificate.add(bound)
        self._climb_from(bound)

    def _bound_and_climb(self, family: Family) -> Bound:
        bound = self._bound(family)
        self._climb_from(bound)
        return bound

    def _climb_from(self, bound: Bound) -> None:
        """Improve the family's counts, or at least the best policy so far."""
        climb = self.climb
        few, many = SIMULATIONS
        number = SIMULATED_LAYERS // (len(self.question.facts.layers) * self.question.accumulation)
        most = climb.simulated + max(few, min(many, number))
        here = Climb(self.question, until_s=self._enough_s, simulated=climb.simulated)
        for counts in _variants(bound.counts) if bound.counts else ():
            here.try_counts(counts)
        if here.counts is None and climb.policy is not None:
            here.counts, here.step_s = count(climb.policy, self.question.facts), climb.step_s
        here.improve(most=most, seconds_left=self.seconds_left)
        climb.take(here)

    @property
    def _enough_s(self) -> float:
        bound_s = self.certificate.bound_s if self.certificate.families else 0.0
        return bound_s / (1 - ENOUGH)

    # ---- the exact program

    def _solve_exactly(self, shape: Shape) -> None:
        """Ask for a policy of this shape that is faster; tighten until it fits."""
        question, layers = self.question, len(self.question.facts.layers)
        accumulation = question.accumulation if question.accumulation <= MOST_MICRO_BATCHES else 1
        problem = replace(self._problem(shape), horizon_s=self._modelled_s(accumulation), accumulation=accumulation)
        for _ in range(TRIES):
            left = self.seconds_left()
            if left <= 0:
                return
            exact = solve_exact(
                problem, backend=question.backend, seconds=left, gap=PROOF / 2, nodes=EXACT_NODES // layers
            )
            if exact.policy is None:
                return
            policy = exact.policy.model_copy(update={"accumulation": question.accumulation})
            short = self.climb.offer(policy)
            if not short:
                return
            problem = replace(problem, budgets=_less(problem.budgets, short))

    def _modelled_s(self, accumulation: int) -> float:
        """The best policy's step time with as many micro-batches as the exact program sees."""
        policy = self.best.policy.model_copy(update={"accumulation": accumulation})
        return simulate(policy, self.question.facts, self.question.profile).step_s


def _variants(counts: Counts) -> Iterator[Counts]:
    """The counts in every layout, and with less swapped."""
    on_gpu = {key: number for key, number in counts.kept.items() if key[2] == "gpu"}
    halved = dict(counts.kept)
    for key, number in counts.kept.items():
        if key[1:] == ("all", "host"):
            del halved[key]
            less: Key = (key[0], "matmuls", "host")
            halved[less] = halved.get(less, 0) + number
    for kept in (counts.kept, halved, on_gpu):
        for layout in LAYOUTS if counts.blocks else LAYOUTS[:4]:
            yield counts.change(kept=kept, layout=layout)


def search_full(question: Question) -> Search:
    """Search for the fastest policy. Raises NoScheduleError or OutOfTimeError if nothing fits or was found."""
    begun = time.monotonic()
    first = first_best(question)
    search = Search(question, Climb(question), begun)
    search.climb.offer(first)
    search.run()
    return search


def _less(budgets: Budgets, short: dict[str, int]) -> Budgets:
    """The budgets without what a policy was short of."""
    gpu, host = (short.get(name, 0) for name in ("gpu_memory", "host_memory"))
    return budgets.model_copy(update={"gpu_bytes": budgets.gpu_bytes - gpu, "host_bytes": budgets.host_bytes - host})


def shape_of(policy: Policy) -> Shape:
    """The shape of a policy."""
    resident = frozenset(layer.index for layer in policy.layers if layer.resident)
    return Shape(policy.weight_slots, policy.staging_slots, resident)


def first_best(question: Question) -> Policy:
    """The fastest fixed rule that fits, or the paper's plan; where none does, a plan with optimizer state on NVMe, or
    one with copies out one by one."""
    climb = Climb(question)
    for policy in _rules(question):
        climb.offer(policy)
    if climb.policy is None and question.budgets.nvme_bytes:
        layers = len(question.facts.layers)
        for length in range(1, question.longest_block + 1):
            blocks = {length: layers // length} if length > 1 else {}
            climb.try_counts(Counts(blocks=blocks, staging_slots=2))
    return climb.policy or find(replace(question, staging_slots=1)).policy


def _rules(question: Question) -> Iterator[Policy]:
    facts, accumulation = question.facts, question.accumulation
    yield keep_all(facts, accumulation=accumulation)
    yield megatrain(facts, accumulation=accumulation)
    for interval in range(1, question.longest_block + 1):
        with suppress(DoesNotFit):
            yield every_kth(facts, question.profile, question.budgets, interval=interval, accumulation=accumulation)
            break  # longer blocks recompute more
    else:
        return  # where no rule fits, the time goes to finding anything that does
    with suppress(NoScheduleError, OutOfTimeError):
        yield paper_plan(question)


def paper_plan(question: Question) -> Policy:
    """The paper's plan for the question. Raises NoScheduleError or OutOfTimeError."""
    return find(replace(question, deadline=min(question.deadline, time.monotonic() + PAPER_SECONDS))).policy
