"""The full planner: the best of the fixed rules and of exact solutions for several shapes, whichever is fastest.

A shape is the number of weight and staging slots and the set of resident layers. For one shape the solver decides
everything else, exactly as the simulator will time it (`exact`). Which shape is best is found by search: the solver's
policy is simulated with other slots and with some layers resident, and the solver runs again where that helps, asked
only for what is faster than the best so far. So the proof that comes with a plan is for its shape; other shapes were
tried, not excluded. Every policy is lowered and its memory checked before it counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from ...jobs.errors import DoesNotFit
from ...jobs.policy import Policy
from ..baselines import every_kth, keep_all, megatrain, shortages
from ..hardware import Budgets
from ..simulator import simulate
from .choices import Problem, Shape
from .exact import solve_exact
from .search import NoScheduleError, OutOfTimeError, Question, find

FIRST: Final = Shape(weight_slots=2, staging_slots=3)
OTHERS: Final = (Shape(2, 2), Shape(2, 1))
SLOTS: Final = tuple((weights, staging) for weights in (2, 3, 4) for staging in (1, 2, 3))
RESIDENT: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
"""Numbers of resident layers that are tried."""
WORTH: Final = 0.004
"""Share of the step time by which another shape must be faster to be looked for."""
GAP: Final = 0.004
"""Where the solver may stop, as a share of the step time."""
PROOF: Final = 0.008
"""Share of the step time by which a policy of the plan's shape is proven not to be faster."""
PAPER_SECONDS: Final = 2.0
"""Time for the paper's plan, which is a candidate too."""
TRIES: Final = 4
"""How often one shape is solved again with less memory before it is given up."""
LONGEST_THOUGHT_S: Final = 8.0
"""Seconds in the solver after which no other shape is begun."""
MOST_MICRO_BATCHES: Final = 2
"""Micro-batches whose timing the solver sees all of; of more it sees one, and simulation does the rest."""


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest policy so far."""

    policy: Policy
    step_s: float
    rule: str = ""
    """Name of the rule it came from; empty for the solver's and for neighbours of it."""


@dataclass(slots=True)
class Search:
    """One search: the question, the best policy so far, what was proven, and the time spent."""

    question: Question
    best: Best
    begun: float = field(default_factory=time.monotonic)
    solved: set[Shape] = field(default_factory=set)
    bounds: dict[Shape, float] = field(default_factory=dict)
    """Step time below which no policy of the shape gets, blocks up to the longest included."""

    def seconds_left(self) -> float:
        """Seconds until the deadline, or until enough thought was spent."""
        return min(self.question.seconds_left(), LONGEST_THOUGHT_S - (time.monotonic() - self.begun))

    def offer(self, policy: Policy, *, rule: str = "") -> bool:
        """Take the policy if it is faster than the best and fits."""
        question = self.question
        step_s = simulate(policy, question.facts, question.profile).step_s
        if step_s >= self.best.step_s or shortages(policy, question.facts, question.budgets):
            return False
        self.best = Best(policy, step_s, rule)
        return True

    # ---- the solver

    def solve(
        self, shape: Shape, *, longest_block: int, faster_by: float, seconds: float, relaxed: bool = False
    ) -> None:
        """Look for a policy of this shape that is faster than the best by a share; tighten until it fits."""
        question = self.question
        problem = Problem(
            question.facts,
            question.profile,
            question.budgets,
            shape,
            self._modelled_s() * (1 - faster_by),
            longest_block,
            self._modelled,
        )
        self.solved.add(shape)
        until = time.monotonic() + seconds
        for number in range(TRIES):
            left = min(until - time.monotonic(), question.seconds_left())
            if left <= 0:
                return
            exact = solve_exact(problem, backend=question.backend, seconds=left, gap=GAP, relaxed=relaxed)
            if not number and longest_block == question.longest_block:
                self.bounds[shape] = max(exact.bound_s, self.bounds.get(shape, 0.0))
            if exact.policy is None:
                return
            policy = exact.policy.model_copy(update={"accumulation": question.accumulation})
            short = {s["resource"]: s["shortfall_bytes"] for s in shortages(policy, question.facts, question.budgets)}
            if not short:
                self.offer(policy)
                return
            problem = replace(problem, budgets=_less(problem.budgets, short))

    @property
    def _modelled(self) -> int:
        """Micro-batches that the solver sees; where it does not see all, it sees one: they repeat."""
        accumulation = self.question.accumulation
        return accumulation if accumulation <= MOST_MICRO_BATCHES else 1

    def _modelled_s(self) -> float:
        """The best policy's step time with as many micro-batches as the solver sees."""
        policy = self.best.policy.model_copy(update={"accumulation": self._modelled})
        return simulate(policy, self.question.facts, self.question.profile).step_s

    @property
    def bound_s(self) -> float | None:
        """Proven for the shape of the best policy; None where nothing is."""
        bound = self.bounds.get(shape_of(self.best.policy))
        if bound is None or self.question.accumulation > MOST_MICRO_BATCHES:
            return None
        return min(bound, self.best.step_s)

    # ---- neighbours, by simulation

    def try_neighbours(self) -> None:
        """Other slots and resident layers for the best policy, as long as they help."""
        for policy in self._other_slots(self.best.policy):
            self.offer(policy)
        for policy in self._more_resident(self.best.policy):
            self.offer(policy)

    def _other_slots(self, policy: Policy) -> Iterator[Policy]:
        for weights, staging in SLOTS:
            if (weights, staging) != (policy.weight_slots, policy.staging_slots):
                yield policy.model_copy(update={"weight_slots": weights, "staging_slots": staging})

    def _more_resident(self, policy: Policy) -> Iterator[Policy]:
        """Evenly spread sets of resident layers, growing."""
        count = len(policy.layers)
        for number in (n for n in RESIDENT if n <= count):
            chosen = {round((k + 0.5) * count / number - 0.5) for k in range(number)}
            layers = tuple(layer.model_copy(update={"resident": layer.index in chosen}) for layer in policy.layers)
            yield policy.model_copy(update={"layers": layers})


def search_full(question: Question) -> Search:
    """Search for the fastest policy. Raises NoScheduleError or OutOfTimeError if nothing fits or was found."""
    begun = time.monotonic()
    search = Search(question, first_best(question), begun)
    blocks = question.longest_block if search.best.policy.count_homes()["recompute"] else 1
    if blocks > 1:
        search.solve(FIRST, longest_block=blocks, faster_by=0.0, seconds=search.seconds_left() * 0.3, relaxed=True)
    search.solve(FIRST, longest_block=blocks, faster_by=0.0, seconds=search.seconds_left() * 0.35)
    search.try_neighbours()
    for shape in (shape_of(search.best.policy), *OTHERS):
        if shape not in search.solved and search.seconds_left() > 0:
            search.solve(shape, longest_block=blocks, faster_by=WORTH, seconds=search.seconds_left() * 0.15)
    search.try_neighbours()
    _prove(search)
    return search


def _prove(search: Search) -> None:
    """Bound the step time of the best shape, blocks and all."""
    shape = shape_of(search.best.policy)
    if shape not in search.bounds and search.seconds_left() > 0:
        longest = search.question.longest_block
        search.solve(shape, longest_block=longest, faster_by=PROOF, seconds=search.seconds_left(), relaxed=True)


def _less(budgets: Budgets, short: dict[str, int]) -> Budgets:
    """The budgets without what a policy was short of."""
    gpu, host = (short.get(name, 0) for name in ("gpu_memory", "host_memory"))
    return budgets.model_copy(update={"gpu_bytes": budgets.gpu_bytes - gpu, "host_bytes": budgets.host_bytes - host})


def shape_of(policy: Policy) -> Shape:
    """The shape of a policy."""
    resident = frozenset(layer.index for layer in policy.layers if layer.resident)
    return Shape(policy.weight_slots, policy.staging_slots, resident)


def first_best(question: Question) -> Best:
    """The fastest fixed rule that fits, or the paper's plan; where none does, a plan with copies out one by one."""
    best: Best | None = None
    for name, policy in _rules(question):
        if shortages(policy, question.facts, question.budgets):
            continue
        step_s = simulate(policy, question.facts, question.profile).step_s
        if best is None or step_s < best.step_s:
            best = Best(policy, step_s, name)
    if best is not None:
        return best
    policy = find(replace(question, staging_slots=1)).policy
    return Best(policy, simulate(policy, question.facts, question.profile).step_s, "paper")


def _rules(question: Question) -> Iterator[tuple[str, Policy]]:
    facts, accumulation = question.facts, question.accumulation
    yield "keep_all", keep_all(facts, accumulation=accumulation)
    yield "megatrain", megatrain(facts, accumulation=accumulation)
    for interval in range(1, question.longest_block + 1):
        with suppress(DoesNotFit):
            policy = every_kth(facts, question.profile, question.budgets, interval=interval, accumulation=accumulation)
            yield "every_layer" if interval == 1 else f"every_{interval}", policy
            break  # longer blocks recompute more
    else:
        return  # where no rule fits, the time goes to finding anything that does
    with suppress(NoScheduleError, OutOfTimeError):
        yield "paper", paper_plan(question)


def paper_plan(question: Question) -> Policy:
    """The paper's plan for the question. Raises NoScheduleError or OutOfTimeError."""
    return find(replace(question, deadline=min(question.deadline, time.monotonic() + PAPER_SECONDS))).policy
