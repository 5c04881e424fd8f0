"""The plans of jobs that share a node, solved together.

joint = plan_together([plan_first, plan_second], [profile] * 2, node, ["root 0", "root 0"], beside=[(option, "root 1")])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..jobs.model_facts import ModelFacts
from ..jobs.policy import lower
from .costs import LINK_RATES
from .demand import demand
from .hardware import HardwareProfile
from .options import Planned, PlanOn, option
from .placement.question import NodeState, Option
from .placement.sharing import Link, capacities, demands_of, progressive_filling
from .planner import Plan
from .simulator.predict import step_seconds

_DRAM: Final[Link] = ("dram", "")
_ROUNDS: Final = 6
_UNHINDERED: Final = 0.999
"""Share of its speed alone from which nothing is to be gained for a job."""
Neighbour = tuple[Option, str]
"""A job that runs already and keeps its plan, and the PCIe root of its GPU."""


@dataclass(frozen=True, slots=True)
class Joint:
    """Plans of jobs that share a node."""

    planned: tuple[Planned, ...]
    speeds: tuple[float, ...]
    """Share of its plan's predicted speed that each reaches beside the others; 0 where one of them does not fit. Above
    1 for a plan that was made for slower links than it gets."""
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
    machines: Sequence[HardwareProfile],
    node: NodeState,
    roots: Sequence[str],
    beside: Sequence[Neighbour] = (),
) -> Joint:
    """The plans of jobs that run on one node at the same time, solved together.

    Job k, planned by ``jobs[k]``, gets a GPU of ``node`` under the PCIe root ``roots[k]``; ``machines[k]`` is that GPU
    with what the whole node has. Each is planned as if alone. Where host memory or NVMe are too small for all of them,
    each is planned again for its part, as much as it would take alone: those that can then recompute or move less.
    Where a link (host memory bandwidth, a PCIe root, NVMe) is overfull, each is planned once more for the bandwidth
    that it gets, which often moves fewer bytes; what does better is taken, the plans whose worst job, as a share of its
    speed alone, is faster; jobs ``beside`` them count too, but keep the plans and the memory that they have. Where jobs
    do not fit beside each other, plans without a policy say why, and no job has a speed. ``jobs`` may raise what `plan`
    raises.
    """
    alone = [plan_on(machine) for plan_on, machine in zip(jobs, machines, strict=True)]
    if not all(answer.feasible for _, answer in alone):
        return _unfit(alone, beside)
    best_alone = [answer.predicted.tokens_per_s if answer.predicted else 0.0 for _, answer in alone]
    parts = [_memory_part(machine, node, place, alone, beside) for place, machine in enumerate(machines)]
    if parts != list(machines):
        alone = [plan_on(part) for plan_on, part in zip(jobs, parts, strict=True)]
    fitting, seen = _together(alone, machines, node, roots, beside)
    if not fitting.feasible or min((*fitting.speeds, *fitting.beside), default=1.0) >= _UNHINDERED:
        return fitting
    demands = _demands(alone, node, roots, beside)
    both = enumerate(zip(parts, seen, strict=True))
    narrowed = [_narrow(part, as_seen, place, demands, node) for place, (part, as_seen) in both]
    replanned = [plan_on(machine) for plan_on, machine in zip(jobs, narrowed, strict=True)]
    again, _ = _together(replanned, machines, node, roots, beside)
    return max(fitting, again, key=lambda joint: _worst(joint, best_alone)) if again.feasible else fitting


def _unfit(planned: Sequence[Planned], beside: Sequence[Neighbour]) -> Joint:
    return Joint(tuple(planned), (0.0,) * len(planned), (0.0,) * len(beside))


def _memory_part(
    machine: HardwareProfile, node: NodeState, place: int, planned: Sequence[Planned], beside: Sequence[Neighbour]
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
    return machine.model_copy(update=changes)


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


def _together(
    planned: Sequence[Planned],
    machines: Sequence[HardwareProfile],
    node: NodeState,
    roots: Sequence[str],
    beside: Sequence[Neighbour],
) -> tuple[Joint, list[HardwareProfile]]:
    """How fast these plans are beside each other, and each job's machine with the links as it sees them then.

    The links are shared in turns: who uses one while others do has an equal part of it. So a job's transfers take
    1 + n times as long, n being how many others are at it on average, and its step what the simulator says of that;
    longer transfers keep the link busy for longer, hence the rounds. Host memory, which every operation of the CPU and
    every transfer passes, is shared as placement counts it.
    """
    if not all(answer.feasible for _, answer in planned):
        return _unfit(planned, beside), list(machines)
    every_root = [*roots, *(root for _, root in beside)]
    demands, capacity = _demands(planned, node, roots, beside), capacities(node, every_root)
    fluid = progressive_filling(demands, capacity)
    memory = progressive_filling([{_DRAM: each.get(_DRAM, 0.0)} for each in demands], capacity)
    runs = [_Run(answer, facts, machine, root) for (facts, answer), machine, root in
            zip(planned, machines, roots, strict=True)]  # fmt: skip
    users: list[_Run | _Fixed] = [*runs]
    for each, speed in zip(demands[len(runs) :], fluid[len(runs) :], strict=True):
        users.append(_Fixed({link: rate * speed for link, rate in each.items()}))
    for _ in range(_ROUNDS):
        busy = [user.busy for user in users]
        for place, user in enumerate(users):
            user.share(capacity, [each for other, each in enumerate(busy) if other != place])
    speeds = [min(run.speed, share) for run, share in zip(runs, memory, strict=False)]
    return Joint(tuple(planned), tuple(speeds), tuple(fluid[len(runs) :])), [run.machine for run in runs]


class _Fixed:
    """A job of which only what it asks of links is known, bytes per second at the speed that it has."""

    def __init__(self, rates: Mapping[Link, float]) -> None:
        self._rates = rates
        self.busy: dict[Link, float] = {}
        """Share of the time for which it is on each link."""

    def share(self, capacity: Mapping[Link, float], others: Sequence[Mapping[Link, float]]) -> None:
        """As `_Run.share`."""
        there = {link: 1.0 + sum(other.get(link, 0.0) for other in others) for link in self._rates}
        self.busy = {link: min(1.0, there[link] * rate / capacity[link]) for link, rate in self._rates.items()}


class _Run:
    """A job by its plan on links that others use too."""

    def __init__(self, answer: Plan, facts: ModelFacts, machine: HardwareProfile, root: str) -> None:
        assert answer.policy is not None and answer.predicted is not None
        self._program, self._facts = lower(answer.policy, facts), facts
        self._own, self.machine, self._root = machine, machine, root
        self._promised_s = answer.predicted.step_s
        self._moved = {
            stream: sum(op.bytes for op in self._program.ops if op.stream == stream) for stream in LINK_RATES
        }
        self._step_s = step_seconds(self._program, facts, machine)

    @property
    def speed(self) -> float:
        """Share of its plan's promise."""
        return self._promised_s / self._step_s

    @property
    def busy(self) -> dict[Link, float]:
        """Share of the time for which it is on each link."""
        return {
            self._link(stream): min(1.0, moved / getattr(self.machine, LINK_RATES[stream]) / self._step_s)
            for stream, moved in self._moved.items()
        }

    def share(self, capacity: Mapping[Link, float], others: Sequence[Mapping[Link, float]]) -> None:
        """See the links as they are beside others which are on them for these shares of the time."""
        rates = {}
        for stream, field in LINK_RATES.items():
            link = self._link(stream)
            there = sum(other.get(link, 0.0) for other in others)
            rates[field] = min(getattr(self._own, field), capacity[link] / (1.0 + there))
        self.machine = self._own.model_copy(update=rates)
        self._step_s = step_seconds(self._program, self._facts, self.machine)

    def _link(self, stream: str) -> Link:
        return (stream, self._root if stream in ("h2d", "d2h") else "")


def _narrow(
    part: HardwareProfile,
    as_seen: HardwareProfile,
    place: int,
    demands: Sequence[Mapping[Link, float]],
    node: NodeState,
) -> HardwareProfile:
    """The machine as job ``place`` sees it beside the others, with the host memory bandwidth that they leave it: what
    they were planned to, or its equal part."""
    others, users = _others(demands, _DRAM, place)
    dram = min(part.host_bytes_s, max(node.dram_bytes_s / max(1, users), node.dram_bytes_s - others))
    rates: dict[str, Any] = {field: getattr(as_seen, field) for field in LINK_RATES.values()}
    updates = part.update_parameters_s * dram / part.host_bytes_s
    return part.model_copy(update={**rates, "host_bytes_s": dram, "update_parameters_s": updates})


def _others(demands: Sequence[Mapping[Link, float]], link: Link, place: int) -> tuple[float, int]:
    """What the other jobs ask of a link, and how many jobs use it."""
    asked = [demand.get(link, 0.0) for demand in demands]
    return sum(asked) - asked[place], sum(rate > 0 for rate in asked)
