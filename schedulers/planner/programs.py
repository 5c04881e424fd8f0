"""The exact programs of a search: which are solved for a family, and how each becomes a policy that fits.

Where many layers are alike the solver finds good policies late. Those in which the layers that swap their internals,
and the boundaries on NVMe, are evenly spread are nearly as good, and most often found at once: they are tried as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ...jobs.policy import Policy
from ..hardware import Budgets
from .bound import Bound, within
from .counts import Counts, count
from .exact import Exact, solve_exact
from .first import Fastest
from .parking import NOTHING, Parking, quickest_parking
from .problem import MOST_MICRO_BATCHES, Problem, Shape
from .search import Question

ENOUGH: Final = 0.0095
"""Share of its bound, or of its family's, within which a policy ends the solver's work on its shape."""
WHOLE_LAYERS: Final = 6
"""Of longer chains the exact program has no blocks longer than the bound's, and no NVMe where the bound uses none."""
WORK: Final = 40_000
"""The solver's work (`solver.work_of`) after which nothing more is begun."""
NODES: Final = 1500
"""Nodes of the solver's search tree times layers, after which the first exact program is left; later ones sooner."""
TRIES: Final = 3
"""How often the exact program is solved again with less memory before it is given up."""
PATTERNS: Final = (0.9, 1.1)
"""Beside an exact program, some in which only so many layers may swap, evenly spread, in parts of the bound's count."""
PATTERN_WORK: Final = 20_000
"""Work after which none of these is begun any more: one in which nothing is found may take as long as all before."""
PATTERN_GAP: Final = 0.003
"""Share of its bound within which a policy ends the solver's work on one of these."""
MORE_ROOM: Final = 2
"""Boundaries for which more is parked each time that an exact program finds nothing with what is."""

Key = tuple[Shape, int, int]
"""An exact program: its shape, the longest block, and how many boundaries may be on NVMe."""


class Programs(Fastest):
    """The best policy so far, and the exact programs that were solved on the way to it."""

    def __init__(self, question: Question) -> None:
        super().__init__(question)
        self.programs: dict[Key, Exact] = {}
        self.work = 0
        self._polished: Policy | None = None

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

    def _patterns(self, bound: Bound) -> list[int]:
        """How many layers may swap their internals, in the programs that are tried first."""
        family, kept, layers = bound.family, bound.counts.kept if bound.counts else {}, len(self.question.facts.layers)
        number = sum(many for (_, _, home), many in kept.items() if home == "host")
        if layers <= WHOLE_LAYERS or number < 2 or family.nvme[1] or family.residents[1] or family.parked[1]:
            return []
        return [round(number * part) for part in PATTERNS if round(number * part) < layers]

    def _polish(self, enough_s: float) -> None:
        """Improve the best policy unless it is near the bound or uses NVMe: slots, residents and who swaps stay."""
        best, facts = self.best, self.question.facts
        if best == self._polished:
            return
        near = enough_s >= self.step_s * (1 - PATTERN_GAP) or len(facts.layers) <= WHOLE_LAYERS
        if near or "nvme" in best.homes or self.question.seconds_left() <= 0:
            return
        resident = frozenset(layer.index for layer in best.layers if layer.resident)
        problem = replace(
            self._problem(),
            shape=Shape(best.weight_slots, best.staging_slots, resident, Parking.of(best, facts)),
            longest_block=count(best, facts).longest_block,
            on_nvme=frozenset(),
            swapped=frozenset(layer.index for layer in best.layers if layer.internals_home == "host"),
        )
        exact = self._exactly(problem, gap=PATTERN_GAP, nodes=1, quick=True, enough_s=enough_s)
        if exact.policy is not None:
            self.offer(exact.policy.model_copy(update={"accumulation": self.question.accumulation}))
        self._polished = self.best


def _spread(layers: int, number: int) -> list[int]:
    """``number`` of the layers, evenly spread."""
    return [int((k + 0.5) * layers / number) for k in range(number)]


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
