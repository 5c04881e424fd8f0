"""The full planner: walks to better and better policies, and a proof of how much faster any policy could be.

The best of the fixed rules and of the paper's plan comes first. Then policies are looked at in families (`bound`):
ranges of weight and staging slots, of resident layers, of boundaries on NVMe, of blocks that recompute. Where these
leave room for a better policy a `walk` looks for it in the shapes that most often have it. The family that holds the
proof down is split until it is a single shape, whose exact program (`programs`) is solved: the optimum is the
simulator's step time, so it is a new plan, and the program's bound is one for that shape. The search ends when no
family can hold a policy that is faster by more than `PROOF`. Every policy is lowered, timed by the simulator and its
memory checked before it counts. All work is counted in families, programs, the solver's iterations and what
walks look at, not in seconds: unless the deadline comes first, which the answer then says, equal questions get equal
answers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from .bound import NODES, Bound, Certificate, bound_of, families_of, parts_of
from .first import offer_first
from .loose import Family
from .problem import FEW_LAYERS, MOST_MICRO_BATCHES, Shape
from .programs import WORK, Key, Programs
from .search import Question

PROOF: Final = 0.0099
"""Share of the step time by which no policy is proven to be faster, where the search ends."""
SPARE: Final = 0.95
"""Families in which nobody can beat the plan by this part of `PROOF` need no bound of their own."""
FAR_OFF: Final = 2 * PROOF
"""Where a bound is as far from the plan as that, it is more likely the bound that can be better."""
LIKELY: Final = ((3, 3), (2, 3))
"""Weight and staging slots of the shapes that are tried first."""
FAMILIES: Final = 48
"""Most families that are bounded."""
PROGRAMS: Final = 6
"""Most exact programs that are solved."""
MORE: Final = (72, 16)
"""The same of few layers, whose families and programs take no time."""


class Search(Programs):
    """One search: the question, the best policy so far, what was proven, and the work done."""

    def __init__(self, question: Question) -> None:
        super().__init__(question)
        self.certificate = Certificate()

    @property
    def bound_s(self) -> float | None:
        """No policy is faster; None where time ran out before anything was proven."""
        return min(self.certificate.bound_s, self.step_s) if self.certificate.solved else None

    @property
    def proven(self) -> bool:
        """Whether no policy of the families so far is faster by more than the proof asks for."""
        return bool(self.certificate.solved) and self.certificate.bound_s >= self.step_s * (1 - PROOF)

    def run(self) -> None:
        """Bound, walk and solve until the plan is proven, or the work that may be done is.

        Families with blocks that recompute come last: they take longest to bound, and by then need not be bounded
        higher than the others are.
        """
        first, *others = families_of(self._problem())
        bounds = [self._begin(first)]
        self.certificate.add(bounds[0])
        for family in (family for family in others if not family.blocks[1]):
            bounds.append(self._bound(family, self._spared_s))
            self.certificate.add(bounds[-1])
        for bound in sorted(bounds, key=lambda bound: (bound.family.parked != first.parked, bound.bound_s)):
            if bound.bound_s < self.step_s * (1 - PROOF) and (bound is not bounds[0] or first.parked[0]):
                self._try(bound, *LIKELY[0])
        if self.certificate.bound_s > self.step_s * (1 - FAR_OFF):
            self._improve()
        self._settle()
        for family in (family for family in others if family.blocks[1]):
            self.certificate.add(self._bound(family, min(self._spared_s, self.certificate.bound_s)))
        self._settle()
        if self.work < WORK:
            self._improve()

    def _improve(self) -> None:
        """Walk on from the best policy, and from what the bound says that holds the proof down, where it is not one."""
        begin = self.certificate.least_counted
        if begin and not self.proven and self._walks and self.question.seconds_left() > 0:
            self._polish(begin, self.certificate.bound_s, LIKELY)

    def _settle(self) -> None:
        """Look more closely at the family that holds the proof down, and the next, as long as there is any.

        Nothing more is proven where there is no closer look at one, but others may hold a faster policy.
        """
        while self._goes_on() and self.certificate.open_s < self.step_s * (1 - PROOF):
            least = self.certificate.take()
            if not self._open(least):
                self.certificate.close(least)

    @property
    def _spared_s(self) -> float:
        """Families in which nobody is faster than this need no bound of their own."""
        return self.step_s * (1 - SPARE * PROOF)

    def _begin(self, family: Family) -> Bound:
        """Bound the first family, and try the shapes at once that most often are the best ones."""
        bound = self._bound(family)
        for weights, staging in LIKELY if not family.parked[0] else ():
            if bound.bound_s < self.step_s * (1 - PROOF):
                self._try(bound, weights, staging)
        return bound

    def _try(self, bound: Bound, weights: int, staging: int) -> None:
        """Look for policies of one shape of a family: on walks, or of few layers by its exact program."""
        family = replace(bound.family, weights=(weights,) * 2, staging=(staging,) * 2)
        own = replace(bound, family=family)
        key = self._key(own)
        if not self._walks and key not in self.programs and self._goes_on():
            self._solve(own, key)
        if self._walks and self._goes_on() and (self._wants_nvme(bound) or not (family.nvme[1] or family.parked[1])):
            self._walk(own, key[0])

    @staticmethod
    def _wants_nvme(bound: Bound) -> bool:
        """Whether the bound has more on NVMe than every member of its family must have."""
        family, counts = bound.family, bound.counts
        more = counts is not None and counts.nvme > family.nvme[0]
        return bool(more or (family.parked[1] and not family.nvme[1]))

    @property
    def _walks(self) -> bool:
        """Whether to walk at all: of few layers the exact program finds the best policy at once."""
        return len(self.question.facts.layers) > FEW_LAYERS

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
            if not (least.whole or family.nvme[1] or family.parked[1]):
                bound = self._bound(family, self._spared_s, whole=True)
                self.certificate.add(replace(least, bound_s=max(least.bound_s, bound.bound_s), whole=True))
                return True
        parts = parts_of(family)
        for part in parts:
            bound = self._proven_of(part) or self._bound(part, self._spared_s, rough=not _is_shape(part))
            self.certificate.add(replace(bound, bound_s=max(bound.bound_s, least.bound_s)))
        return bool(parts)

    def _proven_of(self, family: Family) -> Bound | None:
        """The bound of a family that is one shape, from its exact program if that was solved."""
        exact = self.programs.get((Shape(family.weights[0], family.staging[0]), 1, 0))
        plain = _is_shape(family) and not (
            family.residents[1] or family.nvme[1] or family.blocks[1] or family.parked[1]
        )
        return Bound(family, exact.bound_s) if exact is not None and plain else None

    def _goes_on(self) -> bool:
        """Whether there is work left that may be done: of many layers less with many micro-batches, which gain less."""
        share = 2 if self._walks and self.question.accumulation > MOST_MICRO_BATCHES else 1
        families, programs = (FAMILIES, PROGRAMS) if self._walks else MORE
        work_left = self.certificate.solved < families // share and len(self.programs) < programs // share
        return self.question.seconds_left() > 0 and work_left and self.work < WORK

    def _bound(
        self, family: Family, enough_s: float = float("inf"), *, whole: bool = False, rough: bool = False
    ) -> Bound:
        """The family's bound, or that nobody in it is faster than the best policy, or than is enough to know."""
        question, problem = self.question, replace(self._problem(), horizon_s=min(self.step_s, enough_s))
        bound = bound_of(
            problem,
            family,
            backend=question.backend,
            deadline=question.deadline,
            whole=whole,
            rough=rough and self._walks,
            nodes=NODES if self.work < WORK / 2 else 1,
        )
        self.work += bound.work
        return bound

    def _covers(self, family: Family, key: Key) -> bool:
        """Whether the exact program leaves out nobody of the family."""
        _, longest, nvme = key
        blocks = not family.blocks[1] or longest >= self.question.longest_block
        boundaries = nvme == len(self.question.facts.layers) or not family.nvme[1]
        return blocks and boundaries and not (family.residents[1] or family.parked[1])


def _is_shape(family: Family) -> bool:
    """Whether its members have as many slots, and either no resident layers or some."""
    slots = (family.weights, family.staging)
    return all(few == many for few, many in slots) and (family.residents[0] > 0 or not family.residents[1])


def search_full(question: Question) -> Search:
    """Search for the fastest policy. Raises NoScheduleError or OutOfTimeError if nothing fits or was found."""
    search = Search(question)
    offer_first(search)
    search.run()
    search.out_of_time |= question.seconds_left() <= 0
    return search
