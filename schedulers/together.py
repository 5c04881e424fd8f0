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
from .placement.sharing import ALL_D2H, ALL_H2D, COPIES, Link, capacities, demands_of, progressive_filling
from .planner import Plan
from .simulator.predict import step_seconds

_DRAM: Final[Link] = ("dram", "")
_OF_THE_NODE: Final[Mapping[str, Link]] = {"h2d": ALL_H2D, "d2h": ALL_D2H}
"""Links that the copies of every GPU pass, whatever its PCIe root; both directions pass a third one together."""
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
    for (neighbour, root), speed in zip(beside, fluid[len(runs) :], strict=True):
        users.append(_Fixed(neighbour, root, speed))
    for _ in range(_ROUNDS):
        busy = [user.busy for user in users]
        for place, user in enumerate(users):
            user.meet(_Company(capacity, [each for other, each in enumerate(busy) if other != place]))
    speeds = [min(run.speed, share) for run, share in zip(runs, memory, strict=False)]
    return Joint(tuple(planned), tuple(speeds), tuple(fluid[len(runs) :])), [run.machine for run in runs]


@dataclass(frozen=True, slots=True)
class _Company:
    """The links of the node, and how many transfers of others are on each on average."""

    capacity: Mapping[Link, float]
    others: Sequence[Mapping[Link, float]]

    def there(self, link: Link) -> float:
        """How many of the others' transfers are on the link."""
        return sum(other.get(link, 0.0) for other in self.others)

    def part(self, stream: str, root: str) -> float:
        """Bandwidth of a transfer that has its turns on the links which are its direction's."""
        return min(self.capacity[link] / (1.0 + self.there(link)) for link in _links(stream, root))

    def part_of_both(self, rate: float, share: float) -> float:
        """The same where both directions count, of a GPU that copies the other way at ``rate`` for this share of the
        time: either an equal turn, or what that leaves if it cannot use its own."""
        capacity, there = self.capacity[COPIES], self.there(COPIES)
        return max(capacity / (1.0 + share + there), (capacity - share * rate) / (1.0 + there))


def _links(stream: str, root: str) -> tuple[Link, ...]:
    """What a transfer of a GPU under this PCIe root passes, apart from what it shares with the other direction."""
    return ((stream, root), _OF_THE_NODE[stream]) if stream in _OF_THE_NODE else ((stream, ""),)


def _presence(shares: Mapping[str, float], root: str) -> dict[Link, float]:
    """Transfers on each link on average, of a job whose streams are busy for these shares of the time."""
    found: dict[Link, float] = {link: share for stream, share in shares.items() for link in _links(stream, root)}
    return found | {COPIES: sum(share for stream, share in shares.items() if stream in _OF_THE_NODE)}


class _Fixed:
    """A job of which only what it asks of links is known, and the share of it that it gets."""

    def __init__(self, asked: Option, root: str, speed: float) -> None:
        self._rates = {stream: speed * getattr(asked, field) for stream, field in LINK_RATES.items()}
        self._root = root
        self.busy: dict[Link, float] = {}
        """How many of its transfers are on each link on average."""

    def meet(self, company: _Company) -> None:
        """Take its part of the links."""
        parts = {stream: company.part(stream, self._root) for stream in self._rates}
        shares = {stream: min(1.0, rate / parts[stream]) for stream, rate in self._rates.items()}
        self.busy = _presence(shares, self._root)


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
        """How many of its transfers are on each link on average."""
        return _presence(self._shares, self._root)

    @property
    def _shares(self) -> dict[str, float]:
        return {
            stream: min(1.0, moved / getattr(self.machine, LINK_RATES[stream]) / self._step_s)
            for stream, moved in self._moved.items()
        }

    def meet(self, company: _Company) -> None:
        """See the links as they are beside the others."""
        shares, rates = self._shares, {}
        for stream, field in LINK_RATES.items():
            parts = [getattr(self._own, field), company.part(stream, self._root)]
            if stream in _OF_THE_NODE:
                (other_way,) = _OF_THE_NODE.keys() - {stream}
                rate = getattr(self._own, LINK_RATES[other_way])
                parts.append(company.part_of_both(rate, shares[other_way]))
            rates[field] = min(parts)
        self.machine = self._own.model_copy(update=rates)
        self._step_s = step_seconds(self._program, self._facts, self.machine)


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
