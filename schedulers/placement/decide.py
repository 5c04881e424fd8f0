"""From a question to decisions.

1. A job that has waited for ``reserve_after_s`` comes first: it starts, or the place where it will end first is kept.
2. Priorities follow from high to low. Within one, the solver chooses what starts now: each job's gain is how much
   sooner it ends than by waiting, in its own run times, times its weight (age, fair share, deadline). What is still
   blocked keeps its place against lower priorities.
3. Running jobs of clearly lower priority make room for what is left.
4. Everything else gets a reason, and the time at which it is expected to start.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from . import words
from .assignment import UNIT
from .decisions import Decisions, SolverReport, Start, Wait
from .forecast import Expected
from .moving import as_expected, as_waiting, keep_for_leaving, moves
from .preempt import preemptions
from .question import Question, WaitingJob
from .rank import costs, order, weights
from .table import Table

EFFORT: Final = 0.6
"""Work that the solver may do per second that it is given: little enough that the clock rarely cuts in first."""
_STATUSES: Final = ("NOTHING", "OPTIMAL", "FEASIBLE", "FALLBACK")


def decide(question: Question, *, seconds: float = 1.0) -> Decisions:
    """Decide what starts, what leaves, and why everything else waits.

    ``seconds`` is the solver's time; where it is not enough a greedy rule decides and the status says so. Equal
    questions get equal decisions, unless the clock cuts the solver short.
    """
    begun = time.monotonic()
    in_play = [job for job in question.waiting if job.options]
    movers = as_waiting(question)
    cost = costs(question, [*in_play, *movers])
    weight = weights(question, [*in_play, *movers], cost)
    ordered = order(in_play, weight, cost)
    held_back = {job.id for job in question.waiting} | {job.id for job in question.running}
    ready = [job for job in ordered if held_back.isdisjoint(job.after)]

    table = Table(question, weight, cost)
    keep_for_leaving(table)
    table.serve_overdue(_overdue(question, ready))
    expected = _forecast(table, ordered)
    limits = _Limits(begun + seconds, EFFORT * seconds)
    _by_priority(table, order([*ready, *movers], weight, cost), {**expected, **as_expected(question, movers)}, limits)
    after = _forecast(table, ordered)
    if question.rules.moving and table.has_free_gpus:
        table.fill_idle(_blocked(table, ready), after, **limits.left(table))
        after = _forecast(table, ordered)
    preempts, served = preemptions(table, _blocked(table, ready), after)
    preempts += moves(table)
    return Decisions(
        starts=tuple(_starts(table)),
        preempts=tuple(preempts),
        waits=tuple(_waits(table, ordered, after, served)),
        running_end_s=_running_ends(table),
        solver=_report(table, time.monotonic() - begun),
        crowded=frozenset(node for node, placed in table.placed.items() if placed and table.slowed(node)),
    )


def _overdue(question: Question, ready: Sequence[WaitingJob]) -> list[WaitingJob]:
    """Jobs that have waited too long, the oldest first."""
    since = question.now_s - question.rules.reserve_after_s
    return sorted((job for job in ready if job.submitted_s <= since), key=lambda job: (job.submitted_s, job.id))


@dataclass(frozen=True, slots=True)
class _Limits:
    """When the solver must be done, and the work that it may do."""

    deadline: float
    effort: float

    def left(self, table: Table) -> dict[str, float]:
        """For the next choice: half of the seconds and of the effort that are left, so that there is some after it."""
        spent = sum(choice.effort for choice in table.choices)
        return {"seconds": (self.deadline - time.monotonic()) / 2, "effort": (self.effort - spent) / 2}


def _by_priority(table: Table, jobs: Sequence[WaitingJob], expected: dict[str, Expected], limits: _Limits) -> None:
    for _, group in groupby(jobs, key=lambda job: job.priority):
        if not table.has_free_gpus:
            return
        members = _blocked(table, list(group))
        table.fill(members, expected, **limits.left(table))
        table.reserve_for(_blocked(table, members))


def _blocked(table: Table, jobs: Sequence[WaitingJob]) -> list[WaitingJob]:
    started = _started(table)
    return [job for job in jobs if job.id not in started]


def _started(table: Table) -> set[str]:
    return {placed.job.id for node in table.placed.values() for placed in node}


def _forecast(table: Table, ordered: Sequence[WaitingJob]) -> dict[str, Expected]:
    """What is expected of all jobs that have not started, those with a reservation first."""
    forecast = table.forecast.copy()
    kept = [held.job for held in table.reservations.values()]
    first = {job.id for job in kept} | _started(table)
    return forecast.run([*kept, *(job for job in ordered if job.id not in first)])


def _starts(table: Table) -> list[Start]:
    found = []
    for node in sorted(table.placed):
        reached = table.speeds(node)
        for placed in table.placed[node]:
            option, speed = placed.option, reached[placed.job.id]
            run_s = option.startup_s + option.work_tokens / (option.tokens_per_s * speed)
            end_s = table.question.now_s + run_s
            found.append(
                Start(
                    job=placed.job.id,
                    node=node,
                    gpu=placed.gpu.id,
                    option=option,
                    end_s=end_s,
                    speed=speed,
                    words=words.start(table.question, table.ledger(node).node, placed, end_s, speed),
                )
            )
    return found


def _waits(table: Table, ordered: Sequence[WaitingJob], expected: dict[str, Expected], served: set[str]) -> list[Wait]:
    started = _started(table)
    hopeless = [job for job in table.question.waiting if not job.options]
    waiting = [job for job in [*ordered, *hopeless] if job.id not in started]
    found = []
    for job in waiting:
        at = expected.get(job.id)
        code, sentence = words.wait(table, job, at, served)
        found.append(
            Wait(
                job=job.id,
                code=code,
                words=sentence,
                start_s=at.start_s if at else None,
                end_s=at.end_s if at else None,
                node=at.node if at else None,
            )
        )
    return sorted(found, key=lambda wait: float("inf") if wait.start_s is None else wait.start_s)


def _running_ends(table: Table) -> dict[str, float]:
    """Running jobs slow down by as much as the starts beside them take of the node's links."""
    ends: dict[str, float] = {}
    bare = Table(table.question, {}, {})
    for node, ledger in table.forecast.ledgers.items():
        before = bare.speeds(node)
        after = table.speeds(node)
        for job in ledger.running:
            slower = before[job.id] / after[job.id] if job.id in after else 1.0
            ends[job.id] = table.question.now_s + job.remaining_s * slower
    return ends


def _report(table: Table, seconds: float) -> SolverReport:
    statuses = [choice.status for choice in table.choices] or ["NOTHING"]
    return SolverReport(
        status=max(statuses, key=_STATUSES.index),
        objective=sum(choice.objective for choice in table.choices) / UNIT**2,
        seconds=seconds,
    )
