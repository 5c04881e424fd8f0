"""The exact programs of a search: which are solved for a family, and how each becomes a policy that fits.

Where many layers are alike the solver finds good policies late, and a `walk` finds them soon: from one that makes the
bound's choices in layers that are evenly spread, and from the best policy so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from ...jobs.policy import Policy
from ..hardware import Budgets
from .bound import Bound, within
from .counts import Counts, count, spread
from .exact import Exact, solve_exact
from .first import Fastest
from .loose import Family
from .parking import NOTHING, Parking, quickest_parking
from .problem import FEW_LAYERS, MOST_MICRO_BATCHES, Problem, Shape
from .search import Question
from .walk import State, Walk

ENOUGH: Final = 0.0095
"""Share of its bound, or of its family's, within which a policy ends the solver's work on its shape."""
WHOLE_LAYERS: Final = 6
"""Of longer chains the exact program has no blocks longer than the bound's, and no NVMe where the bound uses none."""
WORK: Final = 42_000
"""The solver's work (`solver.work_of`) after which nothing more is begun."""
NODES: Final = 1500
"""Nodes of the solver's search tree times layers, after which the first exact program is left; later ones sooner."""
TRIES: Final = 3
"""How often the exact program is solved again with less memory before it is given up."""
MORE_SWAPS: Final = (1, 0)
"""Walks begin where so many layers more swap their internals than in the bound, which takes parts of layers too."""
NEAR: Final = 0.003
"""Share of its bound within which a policy ends a walk: what is enough for the proof may be bettered in a few steps."""
WALK_WORK: Final = 6_000
"""Work in one shape after which no other walk is begun there."""
WALKS: Final = 12_500
"""Work that goes into walks before the best policy is looked at once more."""
POLISH_WORK: Final = 8_000
POLISHES: Final = 20
"""Work and walks, of each shape, that may go into the best policy when all families have been looked at."""
MORE_ROOM: Final = 2
"""Boundaries for which more is parked each time that an exact program finds nothing with what is."""

Key = tuple[Shape, int, int]
"""An exact program: its shape, the longest block, and how many boundaries may be on NVMe."""


class Programs(Fastest):
    """The best policy so far, and the exact programs that were solved on the way to it."""

    def __init__(self, question: Question) -> None:
        super().__init__(question)
        self.programs: dict[Key, Exact] = {}
        self.work = self.walked = 0

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

    def _exactly(self, problem: Problem, **limits: Any) -> Exact:
        question = self.question
        exact = solve_exact(problem, backend=question.backend, seconds=question.seconds_left(), **limits)
        self.work += exact.work
        return exact

    def _solve(self, least: Bound, key: Key) -> Exact:
        """The fastest policy of a family's shape; resident layers or memory are taken from it until it fits."""
        shape, longest, nvme = key
        problem = within(replace(self._problem(), shape=shape), least.family)
        problem = replace(problem, on_nvme=self._on_nvme(nvme), longest_block=longest)
        more_bytes, few = 0, len(self.question.facts.layers) <= FEW_LAYERS
        for _ in range(TRIES):
            exact = self._exactly(
                problem,
                gap=ENOUGH,
                nodes=1 if nvme else self._nodes(),
                quick=bool(self.programs or nvme),
                enough_s=least.bound_s / (1 - ENOUGH),
                fits=self._takes if few else None,
            )
            self.programs.setdefault(key, exact)
            changed: Problem | None
            if exact.policy is not None:
                changed = self._offer(problem, exact.policy)
            elif least.counts and 0 < nvme < least.counts.nvme:
                nvme = min(least.counts.nvme, self._more_on_nvme(nvme))
                changed = replace(problem, on_nvme=self._on_nvme(nvme))
            else:
                more_bytes += MORE_ROOM * max(self.question.facts.boundary_bytes)
                changed = self._with_more_parked(problem, least.counts, more_bytes)
            if changed is None:
                break
            problem = changed
        return self.programs[key]

    def _takes(self, policy: Policy) -> bool:
        """Offer a policy; False if it would be taken but does not fit."""
        return not self.offer(policy.model_copy(update={"accumulation": self.question.accumulation}))

    def _offer(self, problem: Problem, policy: Policy) -> Problem | None:
        """Offer a policy of the problem's; what to solve instead if it does not fit and there is anything."""
        short = self.offer(policy.model_copy(update={"accumulation": self.question.accumulation}))
        return _smaller(problem, short, len(self.question.facts.layers)) if short and "nvme" not in short else None

    def _on_nvme(self, boundaries: int) -> frozenset[int] | None:
        layers = len(self.question.facts.layers)
        return frozenset(spread(range(layers), boundaries)) if boundaries < layers else None

    def _more_on_nvme(self, boundaries: int) -> int:
        layers = len(self.question.facts.layers)
        return layers * 2 // 3 if boundaries < layers * 2 // 3 else layers

    def _with_more_parked(self, problem: Problem, counts: Counts | None, more_bytes: int) -> Problem | None:
        """The bound's parts of layers had more room than whole ones have; None if nothing more can be parked."""
        shape = problem.shape
        parking = NOTHING if shape.parked == NOTHING else self._parking(counts, more_bytes)
        return None if parking == shape.parked else replace(problem, shape=replace(shape, parked=parking))

    def _walk(self, bound: Bound, shape: Shape) -> None:
        """Walk to better policies of a family's shape, from where the bound would be and then from the best one."""
        walk, until = self._walker(bound, shape), self.work + min(WALK_WORK, WALKS - self.walked)
        starts = [walk.spread(bound.counts, more) for more in MORE_SWAPS] if bound.counts is not None else []
        for start in dict.fromkeys([*starts, walk.state(self.best)]):
            self._walk_from(walk, start, bound.bound_s, until)

    def _walker(self, bound: Bound, shape: Shape) -> Walk:
        """A walk in a family's shape, with blocks as long as the bound's or the best policy's."""
        longest = 1
        if bound.family.blocks[1]:
            counted = (bound.counts or Counts(), count(self.best, self.question.facts))
            longest = min(self.question.longest_block, max(counts.longest_block for counts in counted))
        return Walk(replace(within(replace(self._problem(), shape=shape), bound.family), longest_block=longest))

    def _walk_from(self, walk: Walk, start: State, bound_s: float, until: int, seed: int = 0) -> None:
        """Walk until so much work is done, and again with less memory as long as what is found does not fit."""
        for _ in range(TRIES):
            enough = self.step_s <= bound_s / (1 - ENOUGH)
            if enough or self.work >= until or self.question.seconds_left() <= 0:
                break
            before = walk.work
            found = walk.best(start, bound_s / (1 - NEAR), seed, until - self.work)
            self.work += walk.work - before
            self.walked += walk.work - before
            smaller = self._offer(walk.problem, walk.policy(found)) if found else None
            if smaller is None or smaller.shape != walk.problem.shape or found is None:
                break
            walk, start = Walk(smaller), found

    def _polish(self, begin: Bound, bound_s: float, shapes: Sequence[tuple[int, int]]) -> None:
        """Walk on, with the best policy's slots and with others, from where the bound ``begin`` would and from there.

        ``bound_s`` is what is known of all policies.
        """
        counts, until = begin.counts or Counts(), self.work + POLISH_WORK
        walks = self._walkers(bound_s, shapes, counts)
        for seed in range(0 if counts.nvme else 1, POLISHES):
            for walk in walks:
                if self.work >= until:
                    return
                start = walk.spread(counts, seed // 2 % 3) if seed % 2 == 0 else walk.state(self.best)
                self._walk_from(walk, start, bound_s, until, seed)

    def _walkers(self, bound_s: float, shapes: Sequence[tuple[int, int]], counts: Counts) -> list[Walk]:
        """Walks among policies that have what the best one has, with its slots and with those of ``shapes``.

        Where ``counts`` has boundaries on NVMe, they may have such too.
        """
        best, whole = self.best, (0, len(self.best.layers))
        resident = frozenset(layer.index for layer in best.layers if layer.resident)
        parking = Parking.of(best, self.question.facts)
        nvme = whole if "nvme" in best.homes or counts.nvme else (0, 0)
        blocks = whole if "recompute" in best.homes else (0, 0)
        if nvme[1] and blocks[1]:
            return []  # such programs have no order in which to go through their rows
        slots = dict.fromkeys([(best.weight_slots, best.staging_slots), *shapes])
        families = [Family((weights,) * 2, (staging,) * 2, nvme=nvme, blocks=blocks) for weights, staging in slots]
        return [
            self._walker(Bound(family, bound_s), Shape(*slots, resident, parking))
            for slots, family in zip(slots, families, strict=True)
        ]

    def _nodes(self) -> int:
        """How much of the search tree the next exact program may see."""
        layers, left = len(self.question.facts.layers), max(0.0, 1 - self.work / WORK)
        return max(1, int(NODES / layers / max(1, len(self.programs)) * left))

    def _key(self, least: Bound) -> Key:
        """The exact program of a family."""
        family, counts, facts = least.family, least.counts, self.question.facts
        number = counts.resident if counts and not family.nvme[1] else family.residents[0]
        number = max(family.residents[0], min(family.residents[1], number))
        resident = frozenset(spread(range(len(facts.layers)), number))
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


def _smaller(problem: Problem, short: dict[str, int], layers: int) -> Problem:
    """The problem with a resident layer less, or with less memory, after a policy of it did not fit."""
    resident = problem.shape.resident
    if resident and "gpu_memory" in short:
        fewer = frozenset(spread(range(layers), len(resident) - 1))
        return replace(problem, shape=replace(problem.shape, resident=fewer))
    return replace(problem, budgets=_less(problem.budgets, short))


def _less(budgets: Budgets, short: dict[str, int]) -> Budgets:
    """The budgets without what a policy was short of."""
    gpu, host = (short.get(name, 0) for name in ("gpu_memory", "host_memory"))
    return budgets.model_copy(update={"gpu_bytes": budgets.gpu_bytes - gpu, "host_bytes": budgets.host_bytes - host})
