"""Jobs that run on a slow GPU and would end sooner on a faster one that is free.

They stand in line for it with those that wait. Whoever gets it is told to save its state; until it is back in the queue
the GPU is kept for it.
"""

from __future__ import annotations

from typing import Final

from .decisions import Preempt
from .forecast import Expected
from .question import Option, Question, RunningJob, WaitingJob
from .table import Table
from .words import a, about, clock

WORTH_IT: Final = 0.2
"""Part of the time that a job still needs which a move must save, beside two start-ups."""


def as_waiting(question: Question) -> list[WaitingJob]:
    """Running jobs that may move, as jobs that wait for one of the kinds where they would end clearly sooner."""
    if not question.rules.moving:
        return []
    kinds = {node.name: node.kind for node in question.nodes}
    found = []
    for job in question.running:
        settled = question.now_s - job.started_s >= question.rules.min_run_s
        if job.gpu is None or job.stopping or not job.preemptible or not settled:
            continue
        better = tuple(o for o in job.moves if o.kind != kinds[job.node] and _saves(job, o) > 0)
        if better:
            found.append(_waiting(job, better))
    return found


def as_expected(question: Question, movers: list[WaitingJob]) -> dict[str, Expected]:
    """What those jobs gain by moving is measured by when they end where they are."""
    running = {job.id: job for job in question.running}
    found = {}
    for mover in movers:
        job = running[mover.id]
        end_s = question.now_s + job.remaining_s
        found[mover.id] = Expected(job.node, job.option, job.started_s, end_s, end_s)
    return found


def keep_for_leaving(table: Table) -> None:
    """Keep a GPU for each job that was told to move and has not left yet."""
    for job in table.question.running:
        if not (job.stopping and job.moves and table.question.rules.moving):
            continue
        now_s = table.question.now_s
        expected = table.forecast.look(_waiting(job, job.moves))
        if expected is not None and expected.start_s <= now_s:
            table.start(expected.node, [(_waiting(job, job.moves), expected.option)])


def moves(table: Table) -> list[Preempt]:
    """The jobs that are told to move."""
    question = table.question
    return [
        Preempt(
            job=job.id,
            for_job=job.id,
            words=(
                f"moves to {a(option.kind)} of {node} and ends {about(question, question.now_s + option.seconds)} "
                f"instead of {clock(question, question.now_s + job.remaining_s)}"
            ),
        )
        for job, node, option in table.moved.values()
        if not job.stopping
    ]


def _saves(job: RunningJob, option: Option) -> float:
    return job.remaining_s * (1 - WORTH_IT) - option.seconds - option.startup_s


def _waiting(job: RunningJob, options: tuple[Option, ...]) -> WaitingJob:
    return WaitingJob(id=job.id, user=job.user, priority=job.priority, submitted_s=job.started_s, options=options)
