"""The full planner: the exact program of one shape after the other, and a proof of how much faster any policy could be.

The best of the fixed rules and of the paper's plan comes first. Then policies are looked at in families (`bound`):
ranges of weight and staging slots, of resident layers, of boundaries on NVMe, of blocks that recompute. The family that
holds the proof down is split until it is a single shape, whose exact program (`exact`) is solved: the optimum is the
simulator's step time, so it is a new plan, and the program's bound is one for that shape. The search ends when no
family can hold a policy that is faster by more than `PROOF`. Every policy is lowered, timed by the simulator and its
memory checked before it counts. All work is counted in families, programs and the solver's nodes, not in seconds:
unless the deadline comes first, which the answer then says, equal questions get equal answers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ..hardware import Budgets
from .bound import Bound, Certificate, bound_of, families_of, parts_of, within
from .counts import Counts, count
from .exact import Exact, solve_exact
from .first import Fastest, first_best
from .loose import Family
from .parking import NOTHING, Parking, quickest_parking
from .problem import MOST_MICRO_BATCHES, Problem, Shape
from .search import Question

PROOF: Final = 0.0099
"""Share of the step time by which no policy is proven to be faster, where the search ends."""
ENOUGH: Final = 0.0095
"""Share of its bound, or of its family's, within which a policy ends the solver's work on its shape."""
SPARE: Final = 0.95
"""Families in which nobody can beat the plan by this part of `PROOF` need no bound of their own."""
LIKELY: Final = ((3, 3), (2, 3))
"""Weight and staging slots of the shapes that are tried first."""
WHOLE_LAYERS: Final = 6
"""Of longer chains the exact program has no blocks longer than the bound's, and no NVMe where the bound uses none."""
FAMILIES: Final = 24
"""Most families that are bounded."""
PROGRAMS: Final = 6
"""Most exact programs that are solved."""
WORK: Final = 26_000
"""The solver's work (`solver.work_of`) after which nothing more is begun."""
NODES: Final = 1500
"""Nodes of the solver's search tree times layers, after which the first exact program is left; later ones sooner."""
TRIES: Final = 3
"""How often the exact program is solved again with less memory before it is given up."""
NEAR: Final = 1.2
"""So many times the proof's share from the family's bound, no more programs of the first shape are tried after one."""
FARTHER: Final = 2.0
"""The same for further shapes."""
PATTERNS: Final = (0.9, 1.1)
"""Before an exact program, some in which only so many layers may swap, evenly spread, in parts of the bound's count."""
PATTERN_GAP: Final = 0.003
"""Share of its bound within which a policy ends the solver's work on one of these."""
MORE_ROOM: Final = 2
"""Boundaries for which more is parked each time that an exact program finds nothing with what is."""

Key = tuple[Shape, int, int]
"""An exact program: its shape, the longest block, and how many boundaries may be on NVMe."""


class Search(Fastest):
    """One search: the question, the best policy so far, what was proven, and the work done."""

    def __init__(self, question: Question) -> None:
        super().__init__(question)
        self.certificate = Certificate()
        self.programs: dict[Key, Exact] = {}
        self.work = 0
        self.out_of_time = False

    @property
    def bound_s(self) -> float | None:
        """No policy is faster; None where time ran out before anything was proven."""
        return min(self.certificate.bound_s, self.step_s) if self.certificate.families else None

    @property
    def proven(self) -> bool:
        """Whether no policy of the families so far is faster by more than the proof asks for."""
        return bool(self.certificate.families) and self.certificate.bound_s >= self.step_s * (1 - PROOF)

    def run(self) -> None:
        """Bound and solve until the plan is proven, or the work that may be done is.

        Families with blocks that recompute come last: they take longest to bound, and by then need not be bounded
        higher than the others are.
        """
        first, *others = families_of(self._problem())
        self._begin(first)
        for family in (family for family in others if not family.blocks[1]):
            bound = self._bound(family, self._spared_s)
            self.certificate.add(bound)
            if bound.bound_s < self.step_s * (1 - PROOF):
                self._try(bound, *LIKELY[0])
        self._settle()
        for family in (family for family in others if family.blocks[1]):
            self.certificate.add(self._bound(family, min(self._spared_s, self.certificate.bound_s)))
        self._settle()
        self._polish()

    def _settle(self) -> None:
        """Look more closely at the family that holds the proof down, and the next, as long as there is any."""
        while not self.proven and self._goes_on() and self._open(self.certificate.take()):
            pass

    @property
    def _spared_s(self) -> float:
        """Families in which nobody is faster than this need no bound of their own."""
        return self.step_s * (1 - SPARE * PROOF)

    def _begin(self, family: Family) -> None:
        """Bound the first family, and try the shapes at once that most often are the best ones."""
        bound = self._bound(family)
        self.certificate.add(bound)
        for weights, staging in LIKELY:
            if not self.proven:
                self._try(bound, weights, staging)

    def _try(self, bound: Bound, weights: int, staging: int) -> None:
        """Solve the exact program of one shape of a family."""
        family = replace(bound.family, weights=(weights,) * 2, staging=(staging,) * 2)
        key = self._key(replace(bound, family=family))
        if key in self.programs:
            return
        near = 1.0
        for swapped in (*self._patterns(bound), None):
            if self._goes_on() and bound.bound_s < self.step_s * (1 - near * PROOF):
                self._solve(replace(bound, family=family), key, swapped)
                near = NEAR if not self.programs else FARTHER

    def _patterns(self, bound: Bound) -> list[int]:
        """How many layers may swap their internals, in the programs that are tried first."""
        family, kept, layers = bound.family, bound.counts.kept if bound.counts else {}, len(self.question.facts.layers)
        number = sum(many for (_, _, home), many in kept.items() if home == "host")
        if layers <= WHOLE_LAYERS or number < 2 or family.nvme[1] or family.residents[1] or family.parked[1]:
            return []
        return [round(number * part) for part in PATTERNS if round(number * part) < layers]

    def _polish(self) -> None:
        """Improve a policy that is not proven and uses no NVMe: slots, residents and which layers swap stay."""
        best, facts = self.best, self.question.facts
        if (
            self.proven
            or len(facts.layers) <= WHOLE_LAYERS
            or "nvme" in best.homes
            or self.question.seconds_left() <= 0
        ):
            return
        resident = frozenset(layer.index for layer in best.layers if layer.resident)
        problem = replace(
            self._problem(),
            shape=Shape(best.weight_slots, best.staging_slots, resident, Parking.of(best, facts)),
            longest_block=count(best, facts).longest_block,
            on_nvme=frozenset(),
            swapped=frozenset(layer.index for layer in best.layers if layer.internals_home == "host"),
        )
        exact = self._exactly(problem, gap=PATTERN_GAP, nodes=1, quick=True, enough_s=self.certificate.bound_s)
        if exact.policy is not None:
            self.offer(exact.policy.model_copy(update={"accumulation": self.question.accumulation}))

    def _exactly(self, problem: Problem, **limits: Any) -> Exact:
        question = self.question
        exact = solve_exact(problem, backend=question.backend, seconds=question.seconds_left(), **limits)
        self.work += exact.work
        return exact

    def _open(self, least: Bound) -> bool:
        """Replace the family that holds the proof down by what is better known; False if nothing more can be."""
        family = least.family
        if _is_shape(family):
            key = self._key(least)
            known = self.programs.get(key)
            exact = known or self._solve(least, key)
            better = exact.bound_s if self._covers(family, key) else 0.0
            if known is None or better > least.bound_s:
                self.certificate.add(replace(least, bound_s=max(least.bound_s, better)))
                return True
            if not (least.whole or family.nvme[1] or family.blocks[1] or family.parked[1]):
                bound = self._bound(family, self._spared_s, whole=True)
                self.certificate.add(replace(least, bound_s=max(least.bound_s, bound.bound_s), whole=True))
                return True
        parts = parts_of(family)
        for part in parts:
            bound = self._proven_of(part) or self._bound(part, self._spared_s)
            self.certificate.add(replace(bound, bound_s=max(bound.bound_s, least.bound_s)))
        if not parts:
            self.certificate.add(least)
        return bool(parts)

    def _proven_of(self, family: Family) -> Bound | None:
        """The bound of a family that is one shape, from its exact program if that was solved."""
        exact = self.programs.get((Shape(family.weights[0], family.staging[0]), 1, 0))
        plain = _is_shape(family) and not (
            family.residents[1] or family.nvme[1] or family.blocks[1] or family.parked[1]
        )
        return Bound(family, exact.bound_s) if exact is not None and plain else None

    def _goes_on(self) -> bool:
        """Whether there is work left that may be done: less of it with many micro-batches, where it gains less."""
        self.out_of_time = self.question.seconds_left() <= 0
        share = 1 if self.question.accumulation <= MOST_MICRO_BATCHES else 2
        work_left = self.certificate.solved < FAMILIES // share and len(self.programs) < PROGRAMS // share
        return not self.out_of_time and work_left and self.work < WORK

    def _problem(self) -> Problem:
        question = self.question
        one_by_one = min(question.accumulation, MOST_MICRO_BATCHES)
        return Problem(
            question.facts,
            question.profile,
            question.budgets,
            Shape(),
            self.step_s,
            question.longest_block,
            one_by_one,
            question.accumulation - one_by_one,
            optimizer=question.optimizer,
        )

    def _bound(self, family: Family, enough_s: float = float("inf"), *, whole: bool = False) -> Bound:
        """The family's bound, or that nobody in it is faster than the best policy, or than is enough to know."""
        question, problem = self.question, replace(self._problem(), horizon_s=min(self.step_s, enough_s))
        bound = bound_of(problem, family, backend=question.backend, deadline=question.deadline, whole=whole)
        self.work += bound.work
        return bound

    # ---- the exact program

    def _solve(self, least: Bound, key: Key, swapped: int | None = None) -> Exact:
        """The fastest policy of a family's shape; resident layers or memory are taken from it until it fits.

        With ``swapped``, the fastest one in which only so many layers, evenly spread, swap their internals.
        """
        question, layers = self.question, len(self.question.facts.layers)
        shape, longest, nvme = key
        problem = within(replace(self._problem(), shape=shape), least.family)
        on_nvme = frozenset(_spread(layers, nvme)) if nvme < layers else None
        spread = None if swapped is None else frozenset(_spread(layers, swapped))
        problem = replace(problem, on_nvme=on_nvme, swapped=spread, longest_block=longest)
        first: Exact | None = None
        more_bytes = 0
        for _ in range(TRIES):
            exact = self._exactly(
                problem,
                gap=ENOUGH if swapped is None else PATTERN_GAP,
                nodes=1 if nvme or swapped else self._nodes(layers),
                quick=bool(self.programs or swapped),
                enough_s=least.bound_s / (1 - ENOUGH),
            )
            first = first or exact
            if exact.policy is None and least.counts and 0 < nvme < least.counts.nvme:
                nvme = min(least.counts.nvme, layers * 2 // 3 if nvme < layers * 2 // 3 else layers)
                problem = replace(problem, on_nvme=frozenset(_spread(layers, nvme)))
                continue
            if exact.policy is None and shape.parked == NOTHING:
                break
            if exact.policy is None:  # the bound's parts of layers had more room than whole ones
                more_bytes += MORE_ROOM * max(question.facts.boundary_bytes)
                parking = self._parking(least.counts, more_bytes)
                if parking == problem.shape.parked:
                    break
                problem = replace(problem, shape=replace(problem.shape, parked=parking))
                continue
            short = self.offer(exact.policy.model_copy(update={"accumulation": question.accumulation}))
            if not short or "nvme" in short:
                break
            problem = _smaller(problem, short, layers)
        assert first is not None
        if swapped is None:
            self.programs[key] = first
        return first

    def _nodes(self, layers: int) -> int:
        """How much of the search tree the next exact program may see."""
        left = max(0.0, 1 - self.work / WORK)
        return max(1, int(NODES / layers / max(1, len(self.programs)) * left))

    def _key(self, least: Bound) -> Key:
        """The exact program of a family."""
        family, counts, facts = least.family, least.counts, self.question.facts
        number = counts.resident if counts and not family.nvme[1] else family.residents[0]
        number = max(family.residents[0], min(family.residents[1], number))
        resident = frozenset(_spread(len(facts.layers), number))
        parking = self._parking(counts) if family.parked[1] else NOTHING
        shape = Shape(family.weights[0], family.staging[0], resident, parking)
        if counts is None or len(facts.layers) <= WHOLE_LAYERS:
            layers = len(facts.layers)
            return shape, self.question.longest_block if family.blocks[1] else 1, layers if family.nvme[1] else 0
        few = min(counts.nvme, len(facts.layers) // 2)
        return shape, counts.longest_block if family.blocks[1] else 1, few if family.nvme[1] else 0

    def _parking(self, counts: Counts | None, more_bytes: int = 0) -> Parking:
        """Layers with state or gradient on NVMe: for as much room as the bound wants, or as the best policy has."""
        question = self.question
        if counts is None:
            return Parking.of(self.best, question.facts)
        wanted = counts.parked_bytes + more_bytes
        plain = self.best.parked()
        return quickest_parking(plain, question.facts, question.profile, wanted, counts.nvme) or NOTHING

    def _covers(self, family: Family, key: Key) -> bool:
        """Whether the exact program leaves out nobody of the family."""
        _, longest, nvme = key
        blocks = not family.blocks[1] or longest >= self.question.longest_block
        boundaries = nvme == len(self.question.facts.layers) or not family.nvme[1]
        return blocks and boundaries and not (family.residents[1] or family.parked[1])


def _is_shape(family: Family) -> bool:
    return family.weights[0] == family.weights[1] and family.staging[0] == family.staging[1]


def _spread(layers: int, number: int) -> list[int]:
    """``number`` of the layers, evenly spread."""
    return [int((k + 0.5) * layers / number) for k in range(number)]


def search_full(question: Question) -> Search:
    """Search for the fastest policy. Raises NoScheduleError or OutOfTimeError if nothing fits or was found."""
    search = Search(question)
    search.offer(first_best(question))
    search.run()
    return search


def _smaller(problem: Problem, short: dict[str, int], layers: int) -> Problem:
    """The problem with a resident layer less, or with less memory, after a policy of it did not fit."""
    resident = problem.shape.resident
    if resident and "gpu_memory" in short:
        return replace(problem, shape=replace(problem.shape, resident=frozenset(_spread(layers, len(resident) - 1))))
    return replace(problem, budgets=_less(problem.budgets, short))


def _less(budgets: Budgets, short: dict[str, int]) -> Budgets:
    """The budgets without what a policy was short of."""
    gpu, host = (short.get(name, 0) for name in ("gpu_memory", "host_memory"))
    return budgets.model_copy(update={"gpu_bytes": budgets.gpu_bytes - gpu, "host_bytes": budgets.host_bytes - host})
