"""The choices of the full planner as variables: blocks, homes of boundaries, and what layers keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, Literal

from ...jobs.policy.lowering import NVME_STAGING
from ..costs import staging_bytes
from .linear import Model, Variable, fast_sum
from .problem import Problem, sorts_of

Kept = Literal["matmuls", "all"]
KEPT: Final[tuple[Kept, ...]] = ("matmuls", "all")
Term = Any
"""A linear expression, or a number."""
Edge = tuple[int, int]
Group = tuple[Any, ...]
"""What the choices of interchangeable layers have in common, for example ``("kept", 0, "all", "gpu")``."""


class Variables:
    """Blocks, homes and kept internals: one edge per block, split by whether its first boundary is on the GPU.

    Without ``whole`` layers may choose in parts; only how many of them choose what stays a whole number (`totals`).
    """

    def __init__(self, model: Model, problem: Problem, *, whole: bool = True) -> None:
        self.model, self.problem, self.facts, self.whole = model, problem, problem.facts, whole
        self.parts: dict[Group, list[Variable]] = defaultdict(list)
        self.totals: dict[Group, Variable] = {}
        self.sizes, self.layers = problem.facts.boundary_bytes, range(len(problem.facts.layers))
        self.unit = max(self.sizes)
        self.unparked_room, self.nvme_room = self._rooms()
        self.host_room = max(0, self.unparked_room + problem.parked_bytes)
        self.has_away = max(self.host_room, self.nvme_room) >= min(self.sizes)
        self._add_edges()
        on_nvme = self.layers if problem.on_nvme is None else problem.on_nvme
        may = [i in on_nvme and self.nvme_room >= self.sizes[i] for i in self.layers]
        self.nvme = [self._choice(("nvme",)) if may[i] else None for i in self.layers]
        self.kept: dict[tuple[int, Kept, Literal["gpu", "host"]], Variable] = {}
        self._kept_of: dict[int, list[tuple[tuple[int, Kept, str], Variable]]] = {i: [] for i in self.layers}
        self._add_kept()
        self._add_path()

    # ---- variables

    def _choice(self, *groups: Group) -> Variable:
        variable = self.model.add_binary_variable() if self.whole else self.model.add_variable(lb=0.0, ub=1.0)
        for group in groups:
            self.parts[group].append(variable)
        return variable

    def number(self, wanted: Callable[[Group], bool]) -> Term:
        """How many choices of the groups that are wanted are made."""
        return fast_sum(v for group, variables in self.parts.items() if wanted(group) for v in variables)

    def _add_totals(self) -> None:
        """Equal layers are interchangeable, so to branch on how many of them do something is to branch on it all."""
        for group, variables in self.parts.items():
            total = self.model.add_integer_variable(lb=0, ub=len(variables))
            self.model.add_linear_constraint(total == fast_sum(variables))
            self.totals[group] = total

    def _rooms(self) -> tuple[int, int]:
        """Host memory for what leaves the GPU, less than nothing where more must be parked, and NVMe for boundaries."""
        budgets = self.problem.budgets
        free = budgets.host_bytes - self.problem.state_bytes + self.problem.spared_bytes(self.problem.shape)
        host = free - staging_bytes(self.facts, "host", self.problem.accumulation)
        enough = host + self.problem.parked_bytes >= NVME_STAGING * min(self.sizes[:-1])
        return host, budgets.nvme_bytes if enough else 0

    def _add_edges(self) -> None:
        self.edges: dict[Edge, list[Variable]] = {}
        self.leaving: dict[int, list[Edge]] = defaultdict(list)
        self.arriving: dict[int, list[Edge]] = defaultdict(list)
        for start in self.layers:
            for end in range(start + 1, min(len(self.layers), start + self.problem.longest_block) + 1):
                length: Group = ("block", end - start)
                self.edges[start, end] = [self._choice(length, ("away", k)) for k in range(1 + self.has_away)]
                self.leaving[start].append((start, end))
                self.arriving[end].append((start, end))
        self.chosen = {edge: fast_sum(variables) for edge, variables in self.edges.items()}
        self.on_gpu = [fast_sum(self.edges[e][0] for e in self.leaving[i]) for i in self.layers]
        self.away = [fast_sum(self.edges[e][1] for e in self.leaving[i]) if self.has_away else 0.0 for i in self.layers]

    def _add_kept(self) -> None:
        sorts = sorts_of(self.facts)
        for i in self.layers:
            for kept in KEPT:
                size = self.facts.layers[i].kept_bytes(kept)
                if size:
                    self.kept[i, kept, "gpu"] = self._choice(("kept", sorts[i], kept, "gpu"))
                if size and self.host_room >= size:
                    self.kept[i, kept, "host"] = self._choice(("kept", sorts[i], kept, "host"))
        for key, variable in self.kept.items():
            self._kept_of[key[0]].append((key, variable))

    def _add_path(self) -> None:
        constrain = self.model.add_linear_constraint
        constrain(fast_sum(self.chosen[e] for e in self.leaving[0]) == 1)
        for i in self.layers[1:]:
            arriving = fast_sum(self.chosen[e] for e in self.arriving[i])
            constrain(arriving == self.on_gpu[i] + self.away[i])
        constrain(fast_sum(self.chosen[e] for e in self.arriving[len(self.layers)]) == 1)
        for i in self.layers:
            variable = self.nvme[i]
            if variable is not None:
                constrain(variable <= self.away[i])
            kept = [variable for _, variable in self.kept_of(i)]
            if kept:
                constrain(fast_sum(kept) <= self.chosen[i, i + 1])

    def swaps(self, layer: int) -> bool:
        """Whether internals of the layer may go to the host."""
        return any((layer, kept, "host") in self.kept for kept in KEPT)

    def swapped(self, layer: int) -> Term:
        """1 where internals of the layer go to the host."""
        return fast_sum(variable for (_, _, home), variable in self.kept_of(layer) if home == "host")

    def kept_bytes(self, layer: int, *homes: str) -> Term:
        """Bytes of a layer's internals kept in one of ``homes``."""
        unit = self.facts.layers[layer]
        return fast_sum(
            unit.kept_bytes(kept) * variable for (_, kept, home), variable in self.kept_of(layer) if home in homes
        )

    def kept_of(self, layer: int) -> list[tuple[tuple[int, Kept, str], Variable]]:
        """What may be kept of a layer, with its variables."""
        return self._kept_of[layer]
