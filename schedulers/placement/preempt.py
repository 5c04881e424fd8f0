"""Which running jobs make room for a job of clearly higher priority, and what paused jobs leave for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .decisions import Preempt
from .forecast import Expected
from .ledger import Ledger, Room
from .question import Option, RunningJob, WaitingJob
from .table import Table


def preemptions(
    table: Table, jobs: Sequence[WaitingJob], expected: Mapping[str, Expected]
) -> tuple[list[Preempt], set[str]]:
    """Who must leave for the first of ``jobs``, and which jobs get a place that is being vacated.

    A job of ours leaves if it has run for ``min_run_s``, its priority is lower by ``preempt_margin`` and the other one
    ends sooner that way. A paused job that only holds memory is saved and leaves for anyone. The fewest leave, those of
    lowest priority first.
    """
    question = table.question
    lowest = min((job.priority for job in question.running), default=0)
    paused = any(job.gpu is None for job in question.running)
    leaving = {name: _Leaving(ledger) for name, ledger in table.forecast.ledgers.items()}
    found: list[Preempt] = []
    served: set[str] = set()
    for job in jobs:
        if job.priority - question.rules.preempt_margin < lowest and not paused and not _any_leaves(leaving.values()):
            break
        victims = _make_room(table, leaving, job, expected.get(job.id))
        if victims is not None:
            served.add(job.id)
            found += [Preempt(job=v.id, for_job=job.id, words=_words(v, job)) for v in victims]
    return found, served


class _Leaving:
    """What will be left of a node once all that was told to leave has left."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.gone = {job.id for job in ledger.running if job.stopping}
        self.promised: list[Option] = []

    def room(self, also_gone: Iterable[RunningJob] = ()) -> Room:
        """Room without those that leave and ``also_gone``, less what is promised to others."""
        gone = self.gone | {job.id for job in also_gone}
        left = [job for job in self.ledger.running if job.id in gone]
        now = self.ledger.room(self.ledger.now_s)
        bad = {gpu.id for gpu in self.ledger.node.gpus if gpu.state == "bad"}
        return Room(
            now.gpus + sum(job.gpu is not None and job.gpu not in bad for job in left) - len(self.promised),
            now.host_bytes + sum(job.option.host_bytes for job in left) - sum(p.host_bytes for p in self.promised),
            now.nvme_bytes + sum(job.option.nvme_bytes for job in left) - sum(p.nvme_bytes for p in self.promised),
        )


def _any_leaves(nodes: Iterable[_Leaving]) -> bool:
    return any(node.gone for node in nodes)


def _make_room(
    table: Table, leaving: dict[str, _Leaving], job: WaitingJob, expected: Expected | None
) -> list[RunningJob] | None:
    """Victims for ``job``, none if a place is being vacated already; None if it gets no place that way."""
    best: tuple[tuple[float, ...], str, Option, list[RunningJob]] | None = None
    now_s = table.question.now_s
    for option in job.options:
        if not table.forecast.may_have(job.user, option.kind):
            continue
        if expected is not None and now_s + option.seconds + option.startup_s >= expected.end_s:
            continue
        for name, node in leaving.items():
            if not _may_run(table, job, option, name):
                continue
            victims = _fewest(node, option, _candidates(table, node, job))
            if victims is not None and (node.gone or victims):
                key = (len(victims), sum(victim.priority for victim in victims), option.seconds)
                if best is None or key < best[0]:
                    best = (key, name, option, victims)
    if best is None:
        return None
    _, name, option, victims = best
    leaving[name].gone |= {victim.id for victim in victims}
    leaving[name].promised.append(option)
    return victims


def _may_run(table: Table, job: WaitingJob, option: Option, name: str) -> bool:
    ledger = table.ledger(name)
    held = table.reservation_at(name)
    return (
        ledger.usable
        and ledger.node.kind == option.kind
        and (not job.nodes or name in job.nodes)
        and (held is None or held.job.id == job.id)
    )


def _candidates(table: Table, node: _Leaving, job: WaitingJob) -> list[RunningJob]:
    """Who may be told to leave for ``job``: paused jobs first, then low priorities, then those with most left to do."""
    rules, now_s = table.question.rules, table.question.now_s
    able = [
        one
        for one in node.ledger.running
        if one.id not in node.gone
        and one.id not in table.moved
        and one.preemptible
        and (
            one.gpu is None
            or (one.priority <= job.priority - rules.preempt_margin and now_s - one.started_s >= rules.min_run_s)
        )
    ]
    return sorted(able, key=lambda one: (one.gpu is not None, one.priority, -one.remaining_s, one.id))


def _fewest(node: _Leaving, option: Option, able: Sequence[RunningJob]) -> list[RunningJob] | None:
    """The first candidates without which ``option`` fits; those that turn out not to be needed stay."""
    victims: list[RunningJob] = []
    for one in [None, *able]:
        if one is not None:
            victims.append(one)
        if node.room(victims).holds(option):
            break
    else:
        return None
    for victim in list(victims):
        others = [other for other in victims if other is not victim]
        if node.room(others).holds(option):
            victims = others
    return victims


def _words(victim: RunningJob, job: WaitingJob) -> str:
    if victim.gpu is None:
        return f"it is paused, and {job.id} needs the host memory that it keeps: its state goes into a checkpoint"
    return (
        f"{job.id} has priority {job.priority}, this job {victim.priority}: "
        "it saves its state, returns to the queue and goes on later"
    )
