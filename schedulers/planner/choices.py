"""What the full planner chooses, and the memory that each choice takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...jobs.policy import LayerPolicy, Policy
from ...jobs.policy.artifact import Home
from ...jobs.policy.lowering import HEAD_AHEAD, NVME_STAGING
from ...jobs.policy.parked import RING
from .linear import Model, Variable, fast_sum
from .parking import park, parkable
from .problem import Problem
from .rounding import Item, add_whole_layers
from .variables import Term, Variables


class ParkedPart(NamedTuple):
    """What of one kind, states or gradients, is on NVMe, in units of `Choices.unit`."""

    moved: Term
    """What is read and written."""
    spared: Term
    """Host memory that this gives back."""
    some: Term
    """1 where it is anything at all."""
    least: float
    """That of one layer, at least."""
    most: float
    """That of one layer, at most."""
    total: float
    """That of all layers."""


class Choices(Variables):
    """The variables with their memory: that of the host and of NVMe, and that of the GPU at every moment."""

    def __init__(self, model: Model, problem: Problem, *, whole: bool = True) -> None:
        super().__init__(model, problem, whole=whole)
        self._add_budgets()
        self._add_gpu_memory()
        if not whole:
            self._add_totals()

    # ---- memory

    def _add_budgets(self) -> None:
        constrain = self.model.add_linear_constraint
        on_nvme = fast_sum(self.sizes[i] / self.unit * v for i, v in enumerate(self.nvme) if v is not None)
        held = fast_sum(
            self.sizes[i] / self.unit * self.away[i] + self.kept_bytes(i, "host") * (1 / self.unit) for i in self.layers
        )
        self.some_on_nvme: Variable | None = None
        """1 where any boundary is on NVMe; None where none can be."""
        if any(variable is not None for variable in self.nvme):
            some = self.some_on_nvme = self.model.add_binary_variable()
            for variable in self.nvme:
                if variable is not None:
                    constrain(variable <= some)
            constrain(on_nvme <= self.problem.budgets.nvme_bytes / self.unit)
            held += NVME_STAGING / self.unit * self._largest_on_nvme(some)
        self.parked = self._parking()
        self.spared = fast_sum(part.spared for part in self.parked)
        room = self.unparked_room if self.problem.parked_bytes else self.host_room
        constrain(held - on_nvme - self.spared <= room / self.unit)

    def _largest_on_nvme(self, some: Term) -> Term:
        """Bytes of the largest boundary on NVMe, which all of them pass through the host like."""
        least = min(self.sizes[:-1])
        larger = [(i, v) for i, v in enumerate(self.nvme) if v is not None and self.sizes[i] > least]
        if not larger:
            return least * some
        largest = self.model.add_variable(lb=0.0)
        self.model.add_linear_constraint(largest >= some)
        for i, variable in larger:
            self.model.add_linear_constraint(largest >= self.sizes[i] / least * variable)
        return least * largest

    def _parking(self) -> tuple[ParkedPart, ...]:
        """Optimizer state and gradients on NVMe, as much of each as the solver likes, where it may like any."""
        problem = self.problem
        if not problem.parked_bytes:
            return ()
        kinds = parkable(self.facts, problem.optimizer, problem.accumulation)
        parts = tuple(self._parked_part(sizes) for sizes in kinds)
        most = problem.parked_bytes / self.unit
        self.model.add_linear_constraint(fast_sum(part.spared for part in parts) <= most)
        return parts

    def _parked_part(self, sizes: tuple[int, ...]) -> ParkedPart:
        """Whole layers of it where all are equal. The host gets back what is beyond the buffers that it passes."""
        model, each = self.model, tuple(size / self.unit for size in sizes)
        total, some = sum(each), model.add_binary_variable()
        if min(each) == max(each):
            moved: Term = model.add_integer_variable(lb=0, ub=len(each)) * each[0]
        else:
            moved = model.add_variable(lb=0.0, ub=total)
        part = ParkedPart(moved, model.add_variable(lb=0.0, ub=total), some, min(each), max(each), total)
        model.add_linear_constraint(moved <= total * some)
        model.add_linear_constraint(part.spared <= moved - RING * part.least * some)
        return part

    def _add_gpu_memory(self) -> None:
        """Bytes at each forward, at the loss and at each backward."""
        shape, facts = self.problem.shape, self.facts
        static = shape.weight_slots * max(layer.weight_bytes for layer in facts.layers) + facts.side_bytes
        static += sum(facts.layers[i].weight_bytes for i in shape.resident)
        self.room = self.problem.budgets.gpu_bytes - static
        few, many = self.problem.residents
        self.residents = self.model.add_variable(lb=few, ub=many) if many else 0.0
        lightest = min(layer.weight_bytes for layer in facts.layers)
        held: list[Term] = [self.residents * (lightest / self.unit)]
        for i in self.layers:
            here = self.model.add_variable(lb=0.0)
            grows = (self.sizes[i] * self.on_gpu[i] + self.kept_bytes(i, "gpu")) * (1 / self.unit)
            self.model.add_linear_constraint(here == held[-1] + grows)
            held.append(here)
        for i in self.layers:
            self._bound_forward(i, held[i])
            self._bound_backward(i, held[i + 1])
        self._bound_head(held[-1])

    def _bound(self, fixed: float, held: Term, other: Term) -> None:
        self.model.add_linear_constraint(held + other * (1 / self.unit) <= (self.room - fixed) / self.unit)

    def _bound_forward(self, i: int, held: Term) -> None:
        layer = self.facts.layers[i]
        fixed = self.sizes[i] + self.sizes[i + 1] + layer.forward_workspace_bytes
        fixed += self.facts.head.weight_bytes if i > len(self.layers) + len(self.facts.after) - HEAD_AHEAD else 0
        since = range(max(0, i - self.problem.shape.staging_slots + 1), i)
        leaving = fast_sum(self.sizes[k] * self.away[k] + self.kept_bytes(k, "host") for k in since)
        leaving += self.sizes[0] * self.away[0] if self.facts.input_stays and since.start > 0 else 0.0
        spared = fast_sum(
            (layer.forward_workspace_bytes - layer.workspaces(kept)[0]) * variable
            for (_, kept, _), variable in self.kept_of(i)
        )
        self._bound(fixed, held, leaving + self.kept_bytes(i, "gpu", "host") - spared)
        self._round(fixed, i, since, backward=False)

    def _round(self, fixed: float, i: int, others: range, *, backward: bool) -> None:
        """Where layers choose in parts: count those whose swapped internals are there beside what ``i`` keeps.

        Each has its boundary there too. ``fixed`` is what is there whatever they choose.
        """
        if self.whole:
            return
        layers = self.facts.layers
        plain = layers[i].workspaces("none")[backward]
        items = [
            Item(layers[i].kept_bytes(kept) + layers[i].workspaces(kept)[backward] - plain, i, variable)
            for (_, kept, _), variable in self.kept_of(i)
        ]
        items += [
            Item(layers[k].kept_bytes(kept) + self.sizes[k], k, variable)
            for k in others
            for (_, kept, home), variable in self.kept_of(k)
            if home == "host"
        ]
        residents = self.problem.residents[0] * min(layer.weight_bytes for layer in layers)
        add_whole_layers(self.model, self.room - fixed - residents, items, len(others) + 1)

    def _bound_head(self, held: Term) -> None:
        """Bytes at the loss, and at the backwards of the head and of the units between it and the layers.

        What comes for the layers stands behind the loads of those units, each of which waits for the operation two
        before its backward: there is nothing of it at the loss unless there are no such units, and little to wait for.
        """
        facts, head, staging = self.facts, self.facts.head, self.problem.shape.staging_slots
        passing = (2 + bool(facts.after)) * self.sizes[-1]
        self._bound(passing + head.backward_workspace_bytes + head.weight_bytes + head.gradient_bytes, held, 0.0)
        backwards = [head, *reversed(facts.after)]
        for rank in range(max(0, len(backwards) - 2), len(backwards)):
            unit, leaving = backwards[rank], backwards[max(0, rank - staging + 1) : rank + 1]
            beside = unit.backward_workspace_bytes + unit.weight_bytes if rank else 0
            fixed = passing + beside + sum(one.gradient_bytes for one in leaving)
            self._bound(fixed, held, self._coming(len(self.layers), self.problem.shape.weight_slots))

    def _bound_backward(self, i: int, held: Term) -> None:
        layer = self.facts.layers[i]
        after = [*self.facts.layers, *self.facts.after, self.facts.head]
        leaving = after[i : i + self.problem.shape.staging_slots]
        fixed = self.sizes[i] + self.sizes[i + 1] + layer.backward_workspace_bytes
        fixed += sum(unit.gradient_bytes for unit in leaving)
        spared = fast_sum(
            (layer.backward_workspace_bytes - layer.workspaces(kept)[1]) * variable
            for (_, kept, _), variable in self.kept_of(i)
        )
        here = self.sizes[i] * self.away[i] + self.kept_bytes(i, "host") - spared
        self._bound(fixed, held, here + self._coming(i) + self._recomputed(i))
        below = range(max(0, i - self.problem.shape.weight_slots + 1), i)
        self._round(fixed + self.sizes[i], i, below, backward=True)

    def _coming(self, i: int, most: int | None = None) -> Term:
        """Bytes of what may have come for the layers below ``i``: as many as there are slots beside the one in use."""
        ahead = range(max(0, i - (self.problem.shape.weight_slots - 1 if most is None else most)), i)
        return fast_sum(self.sizes[k] * self.away[k] + self.kept_bytes(k, "host") for k in ahead)

    def _recomputed(self, i: int) -> Term:
        """Bytes of recomputed boundaries of the block that layer ``i`` is in, up to its own."""
        return fast_sum(
            sum(self.sizes[start + 1 : i + 1]) * chosen
            for (start, end), chosen in self.chosen.items()
            if start < i < end
        )

    # ---- the answer

    def decode(self, values: Sequence[float]) -> Policy:
        """The policy that a solution means."""
        shape, facts = self.problem.shape, self.facts
        homes: list[Home] = ["recompute"] * len(self.layers)
        for (start, _), variables in self.edges.items():
            if values[variables[0].id] > 0.5:
                homes[start] = "gpu"
            elif self.has_away and values[variables[1].id] > 0.5:
                variable = self.nvme[start]
                on_nvme = variable is not None and values[variable.id] > 0.5
                homes[start] = "nvme" if on_nvme else "host"
        kept = {key[0]: key for key, variable in self.kept.items() if values[variable.id] > 0.5}
        layers: list[LayerPolicy] = []
        for i in self.layers:
            layer = LayerPolicy(index=i, resident=i in shape.resident)
            if i in kept:
                layer = layer.model_copy(update={"internals": kept[i][1], "internals_home": kept[i][2]})
            layers.append(layer)
        policy = Policy.from_homes(facts, [*homes, "gpu"], accumulation=self.problem.accumulation)
        changes = {"layers": tuple(layers), "weight_slots": shape.weight_slots, "staging_slots": shape.staging_slots}
        return park(policy.model_copy(update=changes), facts, shape.parked)
