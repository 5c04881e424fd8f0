"""From the solver's schedule to a policy whose program fits: solve, lower, check, tighten, solve again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...jobs.model_facts import ModelFacts
from ...jobs.optimizer_bytes import DEFAULT_OPTIMIZER, OptimizerOptions
from ...jobs.policy import Policy, Program
from ..baselines import host_rooms, shortages
from ..costs import lowered, state_bytes
from ..hardware import Budgets, HardwareProfile
from .instance import LONGEST_BLOCK, Instance, make_instance, price
from .paper import Solution, Tier, solve


@dataclass(frozen=True, slots=True)
class Question:
    """What to plan for, within which bytes of each tier, and how long to think."""

    facts: ModelFacts
    profile: HardwareProfile
    budgets: Budgets
    accumulation: int
    backend: str
    deadline: float
    """`time.monotonic` at which to stop."""
    staging_slots: int = 2
    longest_block: int = LONGEST_BLOCK
    optimizer: OptimizerOptions = DEFAULT_OPTIMIZER
    turns: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)
    """One is taken for each schedule that is solved and checked; where they end, so does the work."""
    solved: dict[Instance, Solution] = field(default_factory=dict, compare=False, repr=False)
    """Problems proven so far: tightening comes back to the same ones, above all when nothing fits."""

    def budget(self, tier: Tier) -> int:
        """Bytes of a tier."""
        return self.budgets.by_tier()[tier]

    def with_budgets(self, **bytes_by_tier: int) -> Question:
        """The same question with the budgets of some tiers replaced."""
        changes = {f"{tier}_bytes": size for tier, size in bytes_by_tier.items()}
        return replace(self, budgets=self.budgets.model_copy(update=changes))

    @property
    def state_bytes(self) -> int:
        """Host memory that the model's state takes with nothing on NVMe."""
        return sum(state_bytes(self.facts, accumulation=self.accumulation, optimizer=self.optimizer).values())

    def own(self, policy: Policy) -> Policy:
        """The policy for this question's optimizer and machine."""
        return policy.model_copy(update={"optimizer": self.optimizer, "hardware_digest": self.profile.digest})

    def seconds_left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def solve(self, instance: Instance) -> Solution:
        """The solver's answer, remembered once it is proven."""
        if instance in self.solved:
            return replace(self.solved[instance], seconds=0.0)
        solution = solve(instance, backend=self.backend, seconds=self.seconds_left())
        if solution.status in ("OPTIMAL", "INFEASIBLE"):
            self.solved[instance] = solution
        return solution

    def policy(self, solution: Solution) -> Policy:
        """The solution as a policy."""
        made = Policy.from_homes(self.facts, solution.homes, accumulation=self.accumulation)
        return self.own(made.model_copy(update={"staging_slots": self.staging_slots}))


@dataclass(frozen=True, slots=True)
class Found:
    """A policy that fits, its program, and the solver's word on it."""

    policy: Policy
    program: Program
    solution: Solution
    seconds: float
    """Wall-clock time in the solver, all solves together."""


class NoScheduleError(Exception):
    """Proven: nothing fits. ``attempts`` holds the last problem of each way tried."""

    def __init__(self, *attempts: Attempt) -> None:
        super().__init__()
        self.attempts = attempts


class OutOfTimeError(Exception):
    """The deadline passed, or all turns were taken, before there was any schedule that fits."""


@dataclass(slots=True)
class Attempt:
    """One way to plan, with or without NVMe and with blocks up to some length, and how far it got."""

    question: Question
    instance: Instance
    overshoot: int | None = None
    """Least excess of GPU memory among the schedules that did not fit."""
    seconds: float = 0.0

    def solve(self, instance: Instance) -> tuple[Found, dict[str, int]]:
        """Solve, lower and check: what was found and the bytes by which it passes budgets, by resource."""
        question, self.instance = self.question, instance.with_budgets(instance.reachable_budgets)
        if next(question.turns, None) is None:
            raise OutOfTimeError
        solution = question.solve(self.instance)
        self.seconds += solution.seconds
        if solution.status == "INFEASIBLE":
            raise NoScheduleError(self)
        if solution.status == "NO_SOLUTION":
            raise OutOfTimeError
        policy = question.policy(solution)
        program = lowered(policy, question.facts)
        shortfalls = shortages(policy, question.facts, question.budgets, program)
        short = {shortfall["resource"]: shortfall["shortfall_bytes"] for shortfall in shortfalls}
        if "gpu_memory" in short:
            self.overshoot = min(short["gpu_memory"], self.overshoot or short["gpu_memory"])
        return Found(policy, program, solution, self.seconds), short


def find(question: Question) -> Found:
    """The best policy that fits. Raises NoScheduleError or OutOfTimeError.

    The solver foresees the boundaries' bytes only. Two things can take more than that: boundaries on NVMe pass through
    staging buffers, so planning is done without and with NVMe; and recomputed blocks need room on the GPU, so where the
    first answer does not fit, shorter blocks are tried beside smaller budgets.
    """
    found: list[Found] = []
    attempts: list[Attempt] = []
    out_of_time = False
    for rooms in _rooms(question):
        instance = make_instance(question.facts, question.profile, rooms, longest_block=question.longest_block)
        try:
            for fitting in _shorter_and_shorter(question, instance, attempts):
                found.append(fitting)
        except OutOfTimeError:
            out_of_time = True
    if not found:
        raise OutOfTimeError if out_of_time else NoScheduleError(*attempts)
    seconds = sum(attempt.seconds for attempt in attempts)
    best = replace(min(found, key=_objective_s), seconds=seconds)
    if not out_of_time and all(one.solution.status == "OPTIMAL" for one in found):
        return best
    return replace(best, solution=_unproven(best.solution, found, complete=not out_of_time))


def _shorter_and_shorter(question: Question, instance: Instance, attempts: list[Attempt]) -> Iterator[Found]:
    """What fits with blocks up to the longest, then up to one layer less, as long as that can still be better."""
    best_s = float("inf")
    for longest in range(instance.longest_block, 0, -1):
        attempt = Attempt(question, replace(instance, longest_block=longest))
        attempts.append(attempt)
        if min(instance.budgets.by_tier().values()) < 0:
            return
        try:
            first, short = attempt.solve(attempt.instance)
            if _objective_s(first) >= best_s:
                return
            fitting = _tighten(attempt, first, short) if short else first
        except NoScheduleError:
            continue
        best_s = min(best_s, _objective_s(fitting))
        yield fitting
        if not short:
            return


def _tighten(attempt: Attempt, found: Found, short: dict[str, int]) -> Found:
    """Take from the budgets what was short until the schedule fits, then give back what turns out to be too much."""
    rejected = attempt.instance
    while short:
        rejected = attempt.instance
        found, short = attempt.solve(_tighter(rejected, found.solution, short))
    return _widen(attempt, found, rejected.budgets.gpu_bytes)


def _widen(attempt: Attempt, found: Found, rejected_bytes: int) -> Found:
    """Give back GPU memory, one boundary at a time, up to the budget that was rejected."""
    step = min(attempt.instance.sizes)
    while (wider := attempt.instance.budgets.gpu_bytes + step) < rejected_bytes:
        budgets = attempt.instance.budgets.model_copy(update={"gpu_bytes": wider})
        try:
            better, short = attempt.solve(attempt.instance.with_budgets(budgets))
        except OutOfTimeError:
            return replace(found, solution=replace(found.solution, status="FEASIBLE", bound_s=None))
        if short:
            break
        found = better
    return found


def _tighter(instance: Instance, solution: Solution, short: dict[str, int]) -> Instance:
    """The same problem with budgets smaller than what the solution uses by what was short."""
    used = price(instance, solution.homes).used
    tiers = {"gpu_memory": "gpu_bytes", "host_memory": "host_bytes", "nvme": "nvme_bytes"}
    changes = {tiers[name]: getattr(used, tiers[name]) - size for name, size in short.items()}
    return instance.with_budgets(instance.budgets.model_copy(update=changes))


def _rooms(question: Question) -> Iterator[Budgets]:
    """Bytes for boundaries alone, as if nothing but them took GPU memory: first without NVMe, then with."""
    facts, budgets = question.facts, question.budgets
    everything = Policy.from_homes(facts, ["gpu"] * len(facts.boundary_bytes), accumulation=question.accumulation)
    everything = everything.model_copy(update={"staging_slots": question.staging_slots})
    base = lowered(everything, facts).peak_bytes("gpu") - sum(facts.boundary_bytes)
    without, with_nvme = host_rooms(facts, budgets, question.accumulation, question.optimizer)
    yield Budgets(gpu_bytes=budgets.gpu_bytes - base, host_bytes=without, nvme_bytes=0)
    if budgets.nvme_bytes:
        yield Budgets(gpu_bytes=budgets.gpu_bytes - base, host_bytes=with_nvme, nvme_bytes=budgets.nvme_bytes)


def _unproven(solution: Solution, found: list[Found], *, complete: bool) -> Solution:
    """Without a proof for each way tried, the bound is the least of theirs, if all have one."""
    bounds = [one.solution.bound_s for one in found if one.solution.bound_s is not None]
    bound_s = min(bounds) if complete and len(bounds) == len(found) else None
    return replace(solution, status="FEASIBLE", bound_s=bound_s)


def _objective_s(found: Found) -> float:
    return found.solution.objective_s or 0.0
