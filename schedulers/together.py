"""The plans of jobs that share a node, solved together.

joint = plan_together([plan_first, plan_second], profile, node, ["root 0", "root 0"], beside=[(running, "root 1")])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .demand import demand
from .hardware import HardwareProfile
from .options import Planned, PlanOn, option
from .placement.question import NodeState, Option
from .placement.sharing import Link, capacities, demands_of, progressive_filling

Neighbour = tuple[Option, str]
"""A job that runs already and keeps its plan, and the PCIe root of its GPU."""


@dataclass(frozen=True, slots=True)
class Joint:
    """Plans of jobs that share a node."""

    planned: tuple[Planned, ...]
    speeds: tuple[float, ...]
    """Share of its plan's predicted speed that each reaches beside the others; 0 where one of them does not fit."""
    beside: tuple[float, ...] = ()
    """The same of the neighbours that run already."""

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


def plan_together(
    jobs: Sequence[PlanOn],
    profile: HardwareProfile,
    node: NodeState,
    roots: Sequence[str],
    beside: Sequence[Neighbour] = (),
) -> Joint:
    """The plans of jobs that run on one node at the same time, solved together.

    Job k, planned by ``jobs[k]``, gets a GPU of ``node`` under the PCIe root ``roots[k]``; ``profile`` is that GPU with
    what the whole node has. Each is planned as if alone. Where host memory or NVMe are too small for all of them, each
    is planned again for its part, as much as it would take alone: those that can then recompute or move less. Where a
    link (host memory bandwidth, a PCIe root, NVMe) is overfull, each is planned once more for the bandwidth that is its
    fair part, which often moves fewer bytes; what does better is taken, the plans whose worst job, as a share of its
    speed alone, is faster; jobs ``beside`` them count too, but keep the plans and the memory that they have. Where jobs
    do not fit beside each other, plans without a policy say why, and no job has a speed. ``jobs`` may raise what `plan`
    raises.
    """
    alone = [plan_on(profile) for plan_on in jobs]
    if not all(answer.feasible for _, answer in alone):
        return _unfit(alone, beside)
    best_alone = [answer.predicted.tokens_per_s if answer.predicted else 0.0 for _, answer in alone]
    parts = [_memory_part(profile, node, place, alone, beside) for place in range(len(jobs))]
    if parts != [profile] * len(jobs):
        alone = _plan_each(jobs, parts)
    fitting = _together(alone, node, roots, beside)
    if not fitting.feasible or min((*fitting.speeds, *fitting.beside), default=1.0) >= 1.0:
        return fitting
    narrowed = [_narrow(part, node, roots, place, alone, beside) for place, part in enumerate(parts)]
    again = _together(_plan_each(jobs, narrowed), node, roots, beside)
    return max(fitting, again, key=lambda joint: _worst(joint, best_alone)) if again.feasible else fitting


def _plan_each(jobs: Sequence[PlanOn], profiles: Sequence[HardwareProfile]) -> list[Planned]:
    return [plan_on(profile) for plan_on, profile in zip(jobs, profiles, strict=True)]


def _unfit(planned: Sequence[Planned], beside: Sequence[Neighbour]) -> Joint:
    return Joint(tuple(planned), (0.0,) * len(planned), (0.0,) * len(beside))


def _memory_part(
    profile: HardwareProfile, node: NodeState, place: int, planned: Sequence[Planned], beside: Sequence[Neighbour]
) -> HardwareProfile:
    """The machine with job ``place``'s part of the memories that are too small for what all would take alone."""
    taken = [
        {"host_memory_bytes": answer.predicted.peak_host_bytes, "nvme_bytes": answer.predicted.nvme_bytes}
        for _, answer in planned
        if answer.predicted
    ]
    left = {
        "host_memory_bytes": node.host_bytes - sum(neighbour.host_bytes for neighbour, _ in beside),
        "nvme_bytes": node.nvme_bytes - sum(neighbour.nvme_bytes for neighbour, _ in beside),
    }
    changes = {}
    for name, there_is in left.items():
        wanted = sum(job[name] for job in taken)
        if wanted > there_is:
            changes[name] = max(0, there_is) * taken[place][name] // wanted
    return profile.model_copy(update=changes)


def _worst(joint: Joint, best_alone: Sequence[float]) -> float:
    reached = [rate / alone for rate, alone in zip(joint.tokens_per_s, best_alone, strict=True)]
    return min((*reached, *joint.beside))


def _demands(
    planned: Sequence[Planned], node: NodeState, roots: Sequence[str], beside: Sequence[Neighbour]
) -> list[dict[Link, float]]:
    """What each asks of each link: first the jobs that are planned, then those beside them."""
    asked = [
        demands_of(option(demand(answer.policy, facts, answer.predicted), kind=node.kind, work_tokens=0), root)
        for (facts, answer), root in zip(planned, roots, strict=True)
        if answer.policy
    ]
    return asked + [demands_of(neighbour, root) for neighbour, root in beside]


def _together(planned: Sequence[Planned], node: NodeState, roots: Sequence[str], beside: Sequence[Neighbour]) -> Joint:
    if not all(answer.feasible for _, answer in planned):
        return _unfit(planned, beside)
    every_root = [*roots, *(root for _, root in beside)]
    reached = progressive_filling(_demands(planned, node, roots, beside), capacities(node, every_root))
    return Joint(tuple(planned), tuple(reached[: len(planned)]), tuple(reached[len(planned) :]))


def _narrow(
    profile: HardwareProfile,
    node: NodeState,
    roots: Sequence[str],
    place: int,
    planned: Sequence[Planned],
    beside: Sequence[Neighbour],
) -> HardwareProfile:
    """The machine as job ``place`` sees it when the others take what they were planned to, or their equal part."""
    demands = _demands(planned, node, roots, beside)
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
