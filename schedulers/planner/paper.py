"""The planner of the LazyTrain paper (arXiv 2608.11919), unrestricted, as a mixed-integer program on MathOpt.

Binaries choose the edges of a path over the boundaries and the home of each boundary that the path visits; the
objective is recomputed forward time plus activation traffic that no window hides. The paper has one traffic variable
per boundary and window. Boundaries only have release times, so the bytes that stay exposed on a link are the worst
excess, over all windows w, of what is released from w on over what the windows from w on can hide
(`instance.exposed_bytes`): one variable and L constraints per link have the same optimum. Where boundaries are of
equal size, budgets become whole numbers of boundaries, which spares the solver the fractions between; breaking the
symmetry of equal layers by further constraints only made it slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ...jobs.policy.artifact import Home
from .instance import Instance, Link, price
from .linear import Linear, Model, Variable, fast_sum
from .solver import GAP, Answer, Status, run_solver

Tier = Literal["gpu", "host", "nvme"]
TIERS: Final[tuple[Tier, ...]] = ("gpu", "host", "nvme")


@dataclass(frozen=True, slots=True)
class Solution:
    """The solver's answer. ``INFEASIBLE`` is a proof; ``NO_SOLUTION`` means that time ran out with nothing found."""

    status: Status
    homes: tuple[Home, ...] = ()
    """Home of boundary 0..L; empty without a solution."""
    objective_s: float | None = None
    bound_s: float | None = None
    """Proven lower bound of the objective."""
    seconds: float = 0.0

    @property
    def gap(self) -> float | None:
        """Relative distance of objective and bound."""
        if self.objective_s is None or self.bound_s is None:
            return None
        return (self.objective_s - self.bound_s) / self.objective_s if self.objective_s > 0 else 0.0


def solve(instance: Instance, *, backend: str = "highs", seconds: float = 20.0) -> Solution:
    """The best schedule, proven optimal unless time runs out. Raises InputError for an unknown backend."""
    model = _Model(instance)
    answer = _run(model, None, backend, seconds)
    if answer.values is None:
        return Solution(answer.status, seconds=answer.seconds)
    homes = _canonical(instance, model.decode(answer.values))
    objective_s = price(instance, homes).objective_s
    bound_s = min(objective_s, max(0.0, answer.bound) * _mean_forward_s(instance))
    return Solution(answer.status, homes, _round(objective_s), _round(bound_s), answer.seconds)


def least_bytes(instance: Instance, tier: Tier, *, backend: str = "highs", seconds: float = 5.0) -> int | None:
    """Least bytes of ``tier`` with which a schedule exists when the other budgets stay.

    None if there is none, or time runs out.
    """
    model = _Model(instance, free=tier)
    answer = _run(model, tier, backend, seconds)
    if answer.status != "OPTIMAL" or answer.values is None:
        return None
    homes = model.decode(answer.values)
    return sum(size for size, home in zip(instance.sizes, homes, strict=True) if home == tier)


class _Model:
    """The program's variables and constraints; ``free`` names a tier whose budget is left out."""

    def __init__(self, instance: Instance, free: Tier | None = None) -> None:
        self.instance = instance
        self.model = Model(name="lazytrain-paper")
        self.inner = range(1, instance.layers)
        self.home = {tier: {i: self.model.add_binary_variable() for i in self.inner} for tier in TIERS}
        self.edges = {
            (start, end): self.model.add_binary_variable()
            for start in range(instance.layers)
            for end in range(start + 1, min(instance.layers, start + instance.longest_block) + 1)
        }
        self._add_path()
        self._add_budgets(free)

    def decode(self, values: Sequence[float]) -> tuple[Home, ...]:
        """Home of boundary 0..L in a solution."""
        inner: list[Home] = [
            next((tier for tier in TIERS if values[self.home[tier][i].id] > 0.5), "recompute") for i in self.inner
        ]
        return ("gpu", *inner, "gpu")

    def bytes_in(self, tier: Tier) -> Linear:
        """Bytes of boundaries in a tier, in units of the largest boundary; the first and the last are on the GPU."""
        sizes, largest = self.instance.sizes, max(self.instance.sizes)
        ends = (sizes[0] + sizes[-1]) / largest if tier == "gpu" else 0.0
        return fast_sum(sizes[i] / largest * self.home[tier][i] for i in self.inner) + ends

    def cost(self) -> Linear:
        """The paper's objective in units of the mean forward of a layer."""
        instance = self.instance
        recompute = fast_sum(
            sum(instance.forward_s[start : end - 1]) * edge
            for (start, end), edge in self.edges.items()
            if end > start + 1
        )
        materialised = fast_sum(v for tier in self.home.values() for v in tier.values())
        ties = instance.materialised_s * (materialised + 2) + instance.nvme_s * fast_sum(self.home["nvme"].values())
        exposed = fast_sum(
            self._exposed(link, ("nvme",) if name.startswith("nvme") else ("host", "nvme"))
            for name, link in instance.links.items()
        )
        return (recompute + ties + exposed) * (1 / _mean_forward_s(instance))

    def _add_path(self) -> None:
        arriving: dict[int, list[Variable]] = {i: [] for i in range(self.instance.layers + 1)}
        leaving: dict[int, list[Variable]] = {i: [] for i in range(self.instance.layers + 1)}
        for (start, end), edge in self.edges.items():
            leaving[start].append(edge)
            arriving[end].append(edge)
        self.model.add_linear_constraint(fast_sum(leaving[0]) == 1)
        self.model.add_linear_constraint(fast_sum(arriving[self.instance.layers]) == 1)
        for i in self.inner:
            materialised = fast_sum(tier[i] for tier in self.home.values())
            self.model.add_linear_constraint(fast_sum(arriving[i]) == materialised)
            self.model.add_linear_constraint(fast_sum(leaving[i]) == materialised)

    def _add_budgets(self, free: Tier | None) -> None:
        largest = max(self.instance.sizes)
        budgets = self.instance.reachable_budgets.by_tier()
        for tier in TIERS:
            if tier != free:
                self.model.add_linear_constraint(self.bytes_in(tier) <= budgets[tier] / largest)

    def _exposed(self, link: Link, tiers: tuple[Tier, ...]) -> Linear:
        """Seconds of traffic that no window hides."""
        largest = max(self.instance.sizes)
        exposed = self.model.add_variable(lb=0.0)
        spare = link.spare
        released: list[Linear] = []
        hidden = at_most = 0.0
        for window in reversed(range(self.instance.layers)):
            hidden += spare[window] / largest
            if window:  # boundary 0 stays on the GPU
                share = self.instance.sizes[window] / largest
                released += [share * self.home[tier][window] for tier in tiers]
                at_most += share
            if at_most > hidden:
                self.model.add_linear_constraint(fast_sum(released) - exposed <= hidden)
        return exposed * (largest / link.bytes_s)


def _run(model: _Model, goal: Tier | None, backend: str, seconds: float) -> Answer:
    model.model.minimize(model.cost() if goal is None else model.bytes_in(goal))
    return run_solver(model.model, backend, seconds, GAP)


def _canonical(instance: Instance, homes: tuple[Home, ...]) -> tuple[Home, ...]:
    """The one schedule that stands for all that differ only by exchanging the homes of equal boundaries.

    The GPU takes as many as it can, then the host; the earliest leave the GPU and the very first go to NVMe, where
    their copies have the most windows to hide in. No other assignment to the same boundaries is cheaper.
    """
    size = instance.sizes[0]
    if any(other != size for other in instance.sizes):
        return homes
    kept = [i for i in range(1, instance.layers) if homes[i] != "recompute"]
    on_gpu = min(len(kept), instance.budgets.gpu_bytes // size - 2)
    on_host = min(len(kept) - on_gpu, instance.budgets.host_bytes // size)
    to_nvme = len(kept) - on_gpu - on_host
    placed: dict[int, Home] = dict.fromkeys(kept[:to_nvme], "nvme")
    placed |= dict.fromkeys(kept[to_nvme : to_nvme + on_host], "host")
    placed |= dict.fromkeys(kept[to_nvme + on_host :], "gpu")
    inner: list[Home] = [placed.get(i, "recompute") for i in range(1, instance.layers)]
    return ("gpu", *inner, "gpu")


def _mean_forward_s(instance: Instance) -> float:
    return sum(instance.forward_s) / instance.layers


def _round(seconds: float) -> float:
    """Nine significant digits: what a policy file records does not depend on the last bits of a sum."""
    return float(f"{seconds:.9g}")
