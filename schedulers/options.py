"""What a job can be placed on, by the planner's prediction: nobody types a wall time.

found = options(tokens, {"H800": h800, "RTX3090": rtx3090}, lambda profile: best_batch(facts_of, profile).best...)
WaitingJob(..., options=found.options, limits=found.limits)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..jobs.model_facts import ModelFacts
from ..jobs.units import format_bytes
from .demand import Demand, demand
from .hardware import HardwareProfile
from .placement.question import NodeState, Option
from .placement.sharing import Link, capacities, demands_of, progressive_filling
from .planner import Plan

Planned = tuple[ModelFacts, Plan]
"""A model's facts at the batch that was planned, and the planner's answer."""
PlanOn = Callable[[HardwareProfile], Planned]
"""Plans one job for a machine."""
_RESOURCES: Final = {"gpu_memory": "GPU memory", "host_memory": "host memory", "nvme": "NVMe"}


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Where a job can run: an option per kind of node that can hold it, the planner's words for every other kind."""

    options: tuple[Option, ...]
    limits: dict[str, str]


def options(
    work_tokens: float,
    machines: Mapping[str, HardwareProfile],
    plan_on: PlanOn,
    *,
    startup_s: float = 0.0,
    gpus: Mapping[str, int] | None = None,
) -> JobOptions:
    """Ask the planner about every kind of machine.

    ``machines`` maps a kind of GPU to the profile of one GPU with all of its node's host memory, ``gpus`` to how many
    GPUs share that memory: a job is planned for an equal part of it, and for more only if it does not fit in that.
    ``plan_on`` may raise what the planner raises, OutOfTime for example: that is not an answer, and passes through.
    """
    found: list[Option] = []
    limits: dict[str, str] = {}
    for kind, profile in machines.items():
        facts, answer = _planned(profile, plan_on, (gpus or {}).get(kind, 1))
        if answer.policy is None:
            limits[kind] = limit_words(answer)
        else:
            asked = demand(answer.policy, facts, answer.predicted)
            found.append(option(asked, kind=kind, work_tokens=work_tokens, startup_s=startup_s))
    return JobOptions(tuple(found), limits)


def _planned(profile: HardwareProfile, plan_on: PlanOn, gpus: int) -> Planned:
    if gpus > 1:
        part = profile.model_copy(update={"host_memory_bytes": profile.host_memory_bytes // gpus})
        facts, answer = plan_on(part)
        if answer.feasible:
            return facts, answer
    return plan_on(profile)


def option(asked: Demand, *, kind: str, work_tokens: float, startup_s: float = 0.0) -> Option:
    """The option of a job with this demand and ``work_tokens`` left to train."""
    return Option(kind=kind, work_tokens=work_tokens, startup_s=startup_s, **asked.model_dump())


def limit_words(answer: Plan) -> str:
    """Why a plan does not fit, for a person: ``needs 112GiB of host memory, has 96GiB``."""
    short = [
        f"needs {format_bytes(reason.needed_bytes)} of {_RESOURCES.get(reason.resource, reason.resource)}, "
        f"has {format_bytes(reason.available_bytes)}"
        for reason in answer.reasons
    ]
    return " and ".join(short) or "no plan fits"


@dataclass(frozen=True, slots=True)
class Joint:
    """Plans of jobs that share a node."""

    planned: tuple[Planned, ...]
    speeds: tuple[float, ...]
    """Share of its plan's predicted speed that each reaches beside the others; 0 where one of them does not fit."""

    @property
    def feasible(self) -> bool:
        """Whether all of them fit beside each other."""
        return all(answer.feasible for _, answer in self.planned)

    @property
    def tokens_per_s(self) -> tuple[float, ...]:
        """What each is expected to reach."""
        return tuple(
            (answer.predicted.tokens_per_s if answer.predicted else 0.0) * speed
            for (_, answer), speed in zip(self.planned, self.speeds, strict=True)
        )


def plan_together(jobs: Sequence[PlanOn], profile: HardwareProfile, node: NodeState, roots: Sequence[str]) -> Joint:
    """The plans of jobs that run on one node at the same time, solved together.

    Job k, planned by ``jobs[k]``, gets a GPU of ``node`` under the PCIe root ``roots[k]``; ``profile`` is that GPU with
    what the whole node has. Each is planned as if alone. Where host memory or NVMe are too small for all of them, each
    is planned again for its part, as much as it would take alone: those that can then recompute or move less. Where a
    link (host memory bandwidth, a PCIe root, NVMe) is overfull, each is planned once more for the bandwidth that is its
    fair part, which often moves fewer bytes; what does better is taken, the plans whose worst job, as a share of its
    speed alone, is faster. Where they do not fit beside each other, plans without a policy say why, and no job has a
    speed. ``jobs`` may raise what `plan` raises.
    """
    alone = [plan_on(profile) for plan_on in jobs]
    if not all(answer.feasible for _, answer in alone):
        return Joint(tuple(alone), (0.0,) * len(jobs))
    best_alone = [answer.predicted.tokens_per_s if answer.predicted else 0.0 for _, answer in alone]
    parts = [_memory_part(profile, node, place, alone) for place in range(len(jobs))]
    if parts != [profile] * len(jobs):
        alone = _plan_each(jobs, parts)
    fitting = _together(alone, node, roots)
    if not fitting.feasible or min(fitting.speeds, default=1.0) >= 1.0:
        return fitting
    narrowed = [_narrow(part, node, roots, place, alone) for place, part in enumerate(parts)]
    again = _together(_plan_each(jobs, narrowed), node, roots)
    return max(fitting, again, key=lambda joint: _worst(joint, best_alone)) if again.feasible else fitting


def _plan_each(jobs: Sequence[PlanOn], profiles: Sequence[HardwareProfile]) -> list[Planned]:
    return [plan_on(profile) for plan_on, profile in zip(jobs, profiles, strict=True)]


def _memory_part(profile: HardwareProfile, node: NodeState, place: int, planned: Sequence[Planned]) -> HardwareProfile:
    """The machine with job ``place``'s part of the memories that are too small for what all would take alone."""
    taken = [
        {"host_memory_bytes": answer.predicted.peak_host_bytes, "nvme_bytes": answer.predicted.nvme_bytes}
        for _, answer in planned
        if answer.predicted
    ]
    changes = {}
    for name, there_is in (("host_memory_bytes", node.host_bytes), ("nvme_bytes", node.nvme_bytes)):
        wanted = sum(job[name] for job in taken)
        if wanted > there_is:
            changes[name] = there_is * taken[place][name] // wanted
    return profile.model_copy(update=changes)


def _worst(joint: Joint, best_alone: Sequence[float]) -> float:
    return min(rate / alone for rate, alone in zip(joint.tokens_per_s, best_alone, strict=True))


def _demands(planned: Sequence[Planned], node: NodeState, roots: Sequence[str]) -> list[dict[Link, float]]:
    return [
        demands_of(option(demand(answer.policy, facts, answer.predicted), kind=node.kind, work_tokens=0), root)
        for (facts, answer), root in zip(planned, roots, strict=True)
        if answer.policy
    ]


def _together(planned: Sequence[Planned], node: NodeState, roots: Sequence[str]) -> Joint:
    if not all(answer.feasible for _, answer in planned):
        return Joint(tuple(planned), (0.0,) * len(planned))
    reached = progressive_filling(_demands(planned, node, roots), capacities(node, roots))
    return Joint(tuple(planned), tuple(reached))


def _narrow(
    profile: HardwareProfile, node: NodeState, roots: Sequence[str], place: int, planned: Sequence[Planned]
) -> HardwareProfile:
    """The machine as job ``place`` sees it when the others take what they were planned to, or their equal part."""
    demands = _demands(planned, node, roots)
    left = {
        link: max(capacity / max(1, users), capacity - others)
        for link, capacity in capacities(node, roots).items()
        for others, users in [_others(demands, link, place)]
    }
    rates = {
        "host_bytes_s": min(profile.host_bytes_s, left["dram", ""]),
        "h2d_bytes_s": min(profile.h2d_bytes_s, left["h2d", roots[place]]),
        "d2h_bytes_s": min(profile.d2h_bytes_s, left["d2h", roots[place]]),
        "nvme_read_bytes_s": min(profile.nvme_read_bytes_s, left["nvme_read", ""]),
        "nvme_write_bytes_s": min(profile.nvme_write_bytes_s, left["nvme_write", ""]),
    }
    updates = profile.update_parameters_s * rates["host_bytes_s"] / profile.host_bytes_s
    return profile.model_copy(update={**rates, "update_parameters_s": updates})


def _others(demands: Sequence[Mapping[Link, float]], link: Link, place: int) -> tuple[float, int]:
    """What the other jobs ask of a link, and how many jobs use it."""
    asked = [demand.get(link, 0.0) for demand in demands]
    return sum(asked) - asked[place], sum(rate > 0 for rate in asked)
