"""The state of one decision while it is made: what was started, what is held free, and the choice within a priority."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .assignment import UNIT, Bid, Choice, Limit, Problem, Seat, choose
from .forecast import Expected, Forecast
from .ledger import Ledger
from .question import Gpu, NodeState, Option, Question, RunningJob, WaitingJob
from .sharing import speeds

WINDOW: Final = 24
"""Fewest jobs of one priority that the solver looks at for each kind of GPU; with many free GPUs three for each."""
SLOWED: Final = 0.99
"""Share of its own speed below which it is worth it to plan a job for what its neighbours leave."""
_LARGEST: Final = 10_000.0
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Placed:
    """A job that starts now."""

    job: WaitingJob
    option: Option
    gpu: Gpu


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room that is kept free from ``expected.start_s`` on."""

    job: WaitingJob
    expected: Expected


class Table:
    """Starts and reservations, put down one after the other."""

    def __init__(self, question: Question, weight: Mapping[str, float], cost: Mapping[str, float]) -> None:
        self.question = question
        self.weight, self.cost = weight, cost
        self._running = {job.id: job for job in question.running}
        self.forecast = Forecast(question)
        """Running jobs and starts, nothing else."""
        self.placed: dict[str, list[Placed]] = defaultdict(list)
        """Starts by node."""
        self.reservations: dict[str, Reservation] = {}
        """By kind of GPU: at most one at a time, so that a few old jobs do not bring the rest to a halt."""
        self.moved: dict[str, tuple[RunningJob, str, Option]] = {}
        """Running jobs that leave for a better place, with its node and option."""
        self.choices: list[Choice] = []

    def ledger(self, node: str) -> Ledger:
        """Running jobs and starts of a node."""
        return self.forecast.ledgers[node]

    @property
    def has_free_gpus(self) -> bool:
        """Whether anything could start now."""
        return any(ledger.free_gpus and ledger.usable for ledger in self.forecast.ledgers.values())

    def reservation_at(self, node: str) -> Reservation | None:
        """The reservation on a node."""
        held = self.reservations.get(self.ledger(node).node.kind)
        return held if held is not None and held.expected.node == node else None

    def reserve_for(self, jobs: Iterable[WaitingJob]) -> None:
        """Keep room for the first of ``jobs`` on each kind of GPU that has no reservation yet."""
        for job in jobs:
            expected = self.forecast.look(job)
            if expected is not None and expected.start_s > self.question.now_s:
                self.reservations.setdefault(expected.option.kind, Reservation(job, expected))

    def serve_overdue(self, jobs: Iterable[WaitingJob]) -> None:
        """Start the first of ``jobs`` on each kind of GPU, or keep room for it, while such jobs have few GPUs of it."""
        served = self._kinds_with_enough_overdue()
        for job in jobs:
            expected = self.forecast.look(job)
            if expected is None or expected.option.kind in served:
                continue
            served.add(expected.option.kind)
            if expected.start_s > self.question.now_s:
                self.reservations[expected.option.kind] = Reservation(job, expected)
            else:
                self.start(expected.node, [(job, expected.option)])

    def _kinds_with_enough_overdue(self) -> set[str]:
        """Kinds of which ``reserve_part`` is held by jobs that had to wait, in GPUs or in their part of the memory."""
        rules = self.question.rules
        gpus: dict[str, int] = defaultdict(int)
        overdue: dict[str, float] = defaultdict(float)
        for ledger in self.forecast.ledgers.values():
            gpus[ledger.node.kind] += len(ledger.node.gpus)
            part = max(1.0, ledger.node.host_bytes / max(1, len(ledger.node.gpus)))
            overdue[ledger.node.kind] += sum(
                max(1.0, job.option.host_bytes / part)
                for job in ledger.running
                if job.waited_s >= rules.reserve_after_s and job.gpu is not None
            )
        return {kind for kind, count in overdue.items() if count >= max(1.0, rules.reserve_part * gpus[kind])}

    def start(self, node: str, jobs: Sequence[tuple[WaitingJob, Option]]) -> None:
        """Start jobs on a node, or keep a GPU for a running one that moves there.

        Those that load PCIe most go first, each to the root with the least load.
        """
        ledger = self.ledger(node)
        for job, option in sorted(jobs, key=lambda each: (-_pcie(each[1]), each[0].id)):
            gpu = min(ledger.free_gpus, key=lambda free: self._root_load(node, free.pcie_root))
            ledger.free_gpus.remove(gpu)
            if job.id in self._running:
                self.moved[job.id] = (self._running[job.id], node, option)
            else:
                self.placed[node].append(Placed(job, option, gpu))
            now_s = self.question.now_s
            self.forecast.put(job, Expected(node, option, now_s, now_s + option.seconds, math.inf))

    def speeds(self, node: str) -> dict[str, float]:
        """Share of its own speed that each job on the node reaches, by id, once the starts run."""
        ledger = self.ledger(node)
        roots = {gpu.id: gpu.pcie_root for gpu in ledger.node.gpus}
        running = [job for job in ledger.running if job.gpu is not None]
        jobs = [(job.option, roots[job.gpu or ""]) for job in running]
        jobs += [(placed.option, placed.gpu.pcie_root) for placed in self.placed[node]]
        names = [job.id for job in running] + [placed.job.id for placed in self.placed[node]]
        return dict(zip(names, speeds(jobs, ledger.node), strict=True))

    def slowed(self, node: str) -> bool:
        """Whether some job on the node will be clearly below its own speed once the starts run."""
        return min(self.speeds(node).values(), default=1.0) < SLOWED

    def fill(
        self, jobs: Sequence[WaitingJob], expected: Mapping[str, Expected], *, seconds: float, effort: float
    ) -> None:
        """Start those of ``jobs``, all of one priority, that together gain most by starting now."""
        offers = [offer for job in jobs if job.id in expected for offer in self._offers(job, expected[job.id])]
        self._choose(offers, seconds=seconds, effort=effort)

    def fill_idle(
        self, jobs: Sequence[WaitingJob], expected: Mapping[str, Expected], *, seconds: float, effort: float
    ) -> None:
        """Start jobs that wait for a faster GPU on those that would be idle; they move later."""
        offers = [offer for job in jobs if job.id in expected for offer in self._stopgaps(job, expected[job.id])]
        self._choose(offers, seconds=seconds, effort=effort)

    def _choose(self, offers: Sequence[_Offer], *, seconds: float, effort: float) -> None:
        offers = _best_jobs(offers, self._free_by_kind())
        problem = self._problem(offers)
        choice = choose(problem, seconds=seconds, effort=effort)
        self.choices.append(choice)
        by_node: dict[str, list[tuple[WaitingJob, Option]]] = defaultdict(list)
        for bid in choice.bids:
            by_node[problem.bids[bid].seat].append((offers[bid].job, offers[bid].option))
        for node in sorted(by_node):
            self.start(node, by_node[node])

    def fits_now(self, job: WaitingJob, node: str, option: Option) -> bool:
        """Whether the node has room for the job at this moment, reservations aside."""
        ledger = self.ledger(node)
        return (
            ledger.usable
            and ledger.node.kind == option.kind
            and bool(ledger.free_gpus)
            and (not job.nodes or node in job.nodes)
            and self.forecast.may_have(job.user, option.kind)
            and ledger.room(self.question.now_s).holds(option)
        )

    def respects(self, option: Option, node: str) -> bool:
        """Whether starting now leaves what is reserved on the node."""
        held = self.reservation_at(node)
        if held is None or self.question.now_s + option.seconds <= held.expected.start_s:
            return True
        room, kept = self.ledger(node).room(held.expected.start_s), held.expected.option
        return (
            room.gpus >= 2
            and option.host_bytes + kept.host_bytes <= room.host_bytes
            and option.nvme_bytes + kept.nvme_bytes <= room.nvme_bytes
        )

    def crowds(self, option: Option, node: str) -> bool:
        """Whether one more job with ``option`` would overfill a link of the node."""
        load = self._seat(node).load
        return any(load.get(link, 0) + more > UNIT for link, more in _load(option, self.ledger(node).node).items())

    def _free_by_kind(self) -> dict[str, int]:
        free: dict[str, int] = defaultdict(int)
        for ledger in self.forecast.ledgers.values():
            free[ledger.node.kind] += len(ledger.free_gpus)
        return dict(free)

    def _root_load(self, node: str, root: str) -> float:
        ledger = self.ledger(node)
        roots = {gpu.id: gpu.pcie_root for gpu in ledger.node.gpus}
        running = [job.option for job in ledger.running if job.gpu is not None and roots[job.gpu] == root]
        return sum(map(_pcie, running)) + sum(
            _pcie(placed.option) for placed in self.placed[node] if placed.gpu.pcie_root == root
        )

    def _problem(self, offers: Sequence[_Offer]) -> Problem:
        top = max((self.weight[offer.job.id] for offer in offers), default=1.0)
        bids = tuple(self._bid(offer, top) for offer in offers)
        seats = tuple(self._seat(node) for node in sorted({offer.node for offer in offers}))
        mean = sum(self.weight[offer.job.id] / top for offer in offers) / max(1, len(offers))
        return Problem(seats, bids, tuple(self._limits(offers)), crowding=max(1, round(mean * UNIT)))

    def _offers(self, job: WaitingJob, expected: Expected) -> Iterable[_Offer]:
        """The nodes where the job could start now and would end no later than by waiting."""
        for option in job.options:
            end_s = self.question.now_s + option.seconds
            if end_s > expected.later_s:
                continue
            for name in self.forecast.ledgers:
                if self.fits_now(job, name, option) and self.respects(option, name):
                    yield _Offer(job, name, option, min(_LARGEST, (expected.later_s - end_s) / self.cost[job.id]))

    def _stopgaps(self, job: WaitingJob, expected: Expected) -> Iterable[_Offer]:
        """Nodes where the job could start now, worth the time on the faster GPU that this saves until that is free."""
        for option in job.options:
            until_s = expected.start_s - self.question.now_s
            too_soon = until_s < max(self.question.rules.min_run_s, 2 * option.startup_s)
            if too_soon or self.question.now_s + option.seconds <= expected.later_s:
                continue
            tokens = (until_s - option.startup_s) * option.tokens_per_s
            saved = tokens / expected.option.tokens_per_s / self.cost[job.id]
            for name in self.forecast.ledgers:
                if self.fits_now(job, name, option) and self.respects(option, name):
                    yield _Offer(job, name, option, min(_LARGEST, saved))

    def _bid(self, offer: _Offer, top: float) -> Bid:
        node = self.ledger(offer.node).node
        worth = max(1, round(UNIT * self.weight[offer.job.id] / top * offer.saved))
        return Bid(offer.job.id, offer.node, worth, _load(offer.option, node))

    def _seat(self, name: str) -> Seat:
        ledger = self.ledger(name)
        options = [job.option for job in ledger.running if job.gpu is not None]
        options += [placed.option for placed in self.placed[name]]
        load: dict[str, int] = defaultdict(int)
        for option in options:
            for link, amount in _load(option, ledger.node).items():
                load[link] += amount
        return Seat(name, len(options), dict(load))

    def _limits(self, offers: Sequence[_Offer]) -> Iterable[Limit]:
        by_job: dict[str, list[int]] = defaultdict(list)
        by_node: dict[str, list[int]] = defaultdict(list)
        by_quota: dict[tuple[str, str], list[int]] = defaultdict(list)
        for place, offer in enumerate(offers):
            by_job[offer.job.id].append(place)
            by_node[offer.node].append(place)
            by_quota[offer.job.user, offer.option.kind].append(place)
        for places in by_job.values():
            yield Limit(dict.fromkeys(places, 1), 1)
        for node, places in by_node.items():
            yield from self._node_limits(node, places, offers)
        for (user, kind), places in by_quota.items():
            left = self.forecast.quota_left(user, kind)
            if left < len(places):
                yield Limit(dict.fromkeys(places, 1), int(left))

    def _node_limits(self, node: str, places: Sequence[int], offers: Sequence[_Offer]) -> Iterable[Limit]:
        room = self.ledger(node).room(self.question.now_s)
        free = len(self.ledger(node).free_gpus)
        yield from _room_limits(places, offers, free, room.host_bytes, room.nvme_bytes)
        held = self.reservation_at(node)
        if held is not None:
            later = [p for p in places if self.question.now_s + offers[p].option.seconds > held.expected.start_s]
            room, kept = self.ledger(node).room(held.expected.start_s), held.expected.option
            yield from _room_limits(
                later, offers, room.gpus - 1, room.host_bytes - kept.host_bytes, room.nvme_bytes - kept.nvme_bytes
            )


@dataclass(frozen=True, slots=True)
class _Offer:
    job: WaitingJob
    node: str
    option: Option
    saved: float
    """By how many of its own run times it ends sooner by starting here now."""


def _best_jobs(offers: Sequence[_Offer], free: Mapping[str, int]) -> list[_Offer]:
    """All offers of the jobs that come first for some kind of GPU: jobs are offered in their order."""
    kept: set[str] = set()
    for kind, gpus in free.items():
        jobs = dict.fromkeys(offer.job.id for offer in offers if offer.option.kind == kind)
        kept.update(list(jobs)[: max(WINDOW, 3 * gpus)])
    return [offer for offer in offers if offer.job.id in kept]


def _room_limits(
    places: Sequence[int], offers: Sequence[_Offer], gpus: int, host_bytes: int, nvme_bytes: int
) -> Iterable[Limit]:
    """GPUs, host memory and NVMe, the last two in whole MiB, needs rounded up and room rounded down."""
    if not places:
        return
    yield Limit(dict.fromkeys(places, 1), max(0, gpus))
    host = {place: -(-offers[place].option.host_bytes // _MIB) for place in places}
    nvme = {place: -(-offers[place].option.nvme_bytes // _MIB) for place in places}
    for needs, left in ((host, host_bytes // _MIB), (nvme, nvme_bytes // _MIB)):
        if sum(needs.values()) > left:
            yield Limit(needs, max(0, left))


def _load(option: Option, node: NodeState) -> dict[str, int]:
    """What an option asks of the node's links, in `UNIT` of each; the PCIe roots of a node count as one link."""
    roots = max(1, len({gpu.pcie_root for gpu in node.gpus}))
    asked = {
        "dram": (option.dram_bytes_s, node.dram_bytes_s),
        "h2d": (option.h2d_bytes_s, min(node.pcie_bytes_s * roots, node.h2d_bytes_s)),
        "d2h": (option.d2h_bytes_s, min(node.pcie_bytes_s * roots, node.d2h_bytes_s)),
        "copies": (_pcie(option), node.copies_bytes_s),
        "nvme_read": (option.nvme_read_bytes_s, node.nvme_read_bytes_s),
        "nvme_write": (option.nvme_write_bytes_s, node.nvme_write_bytes_s),
    }
    return {link: math.ceil(UNIT * rate / has) for link, (rate, has) in asked.items() if rate > 0 and has < math.inf}


def _pcie(option: Option) -> float:
    return option.h2d_bytes_s + option.d2h_bytes_s
