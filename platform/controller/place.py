"""Asking placement, and doing what it decides."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...jobs.errors import LazytrainError, Unreachable
from ...jobs.frozen import digest
from ...jobs.lifecycle import JobState
from ...schedulers.placement import Decisions, Preempt, Question, Start, Wait, WaitCode
from ..admission import Admission, Beside
from ..artifacts import JobFiles
from ..cluster.runs import Outcome, RunOrder
from ..store import Job, Node
from .company import look_at_company
from .desk import ACTIVE, AT_ONCE_S, MOVING, PREEMPTED, SPILLING, Desk
from .endings import fail
from .failures import LONGEST_PAUSE_S, Failure, classify
from .question import Table, fingerprint, question
from .searched import search_for, take_in, wants_search
from .together import Meeting, ready, tell_neighbours

log = logging.getLogger(__name__)
_S = JobState
_AGAIN_S = 30.0
"""Placement that had nothing to do is asked again after this time, or as soon as anything is different."""
_FORETELL_EVERY_S = 5.0


def place(desk: Desk) -> None:
    """Start what can start now, preempt what has to make room, and tell everybody else why they wait."""
    table = _table(desk)
    if not table.waiting and not table.running:
        return
    asked = question(desk, table)
    tell_neighbours(desk, asked, table)
    look_at_company(desk, asked, table)
    seen = fingerprint(asked)
    if seen == desk.notes.settled and desk.steady() - desk.notes.settled_at < _AGAIN_S:
        return
    decisions = desk.decide(asked)
    all_told = _act(desk, decisions, asked, table)
    settled = all_told and not decisions.starts and not decisions.preempts
    desk.notes.settled, desk.notes.settled_at = (seen if settled else None), desk.steady()


def _table(desk: Desk) -> Table:
    """Who waits for a place, and who has one; jobs that wait for others which are not at the table hear so."""
    jobs = list(reversed(desk.store.jobs.list(states=[_S.QUEUED, _S.PAUSED, *ACTIVE])))
    queued = [job for job in jobs if job.state is _S.QUEUED]
    unmet = _unmet(desk, queued)
    plans = desk.plans(jobs)
    desk.notes.plans = {name: known for name, known in desk.notes.plans.items() if name in plans}
    ready = {job.id: job for job in queued if job.id in plans and job.id in unmet and _due(job, desk.clock())}
    nodes = {node.name: node for node in desk.store.nodes.list()}
    running = {job.id: job for job in jobs if _has_a_place(job) and job.node in nodes and job.id in plans}
    held = {job.id: job for job in ready.values() if not unmet[job.id] <= {*ready, *running}}
    desk.for_each(held.values(), lambda job: _hold(desk, job, unmet[job.id]))
    waiting = {name: job for name, job in ready.items() if name not in held}
    return Table(waiting, running, plans, nodes, unmet)


def _due(job: Job, now: float) -> bool:
    """Whether its pause is over; one that is longer than any of ours was set by a clock that was wrong."""
    return not now < job.not_before <= now + LONGEST_PAUSE_S


def _has_a_place(job: Job) -> bool:
    """Whether it holds something of a node: a GPU, or only memory while it is paused, or leaves after that."""
    return job.state is not _S.QUEUED and bool(job.gpu or job.claim)


def _act(desk: Desk, decisions: Decisions, asked: Question, table: Table) -> bool:
    """Do it; whether everybody who waits was told why."""
    starts, met = ready(desk, decisions, asked, table)
    waits = {wait.job: wait for wait in decisions.waits}
    preempts = {preempt.job: preempt for preempt in decisions.preempts}
    waiting, running = table.waiting, table.running
    starting = [waiting[name] for name in starts]
    desk.for_each(starting, lambda job: _start(desk, job, starts[job.id], table, met.get(job.id)))
    desk.for_each((running[name] for name in preempts), lambda job: _preempt(desk, job, preempts[job.id]))
    told = {name: (wait.code.value, wait.words) for name, wait in waits.items()}
    left = [job for name, job in waiting.items() if name in told and told[name] != (job.reason, job.sentence)]
    _foretell(desk, decisions)
    return desk.for_each(left, lambda job: _wait(desk, job, waits[job.id]), within_s=AT_ONCE_S)


def _foretell(desk: Desk, decisions: Decisions) -> None:
    """Let people know when their jobs are expected to run; now and then, because it changes all the time."""
    now = desk.steady()
    if now - desk.notes.foretold_at >= _FORETELL_EVERY_S:
        desk.store.forecasts.put({wait.job: (wait.start_s, wait.end_s) for wait in decisions.waits}, desk.clock())
        desk.notes.foretold_at = now


# ---- the answer


def _start(desk: Desk, job: Job, start: Start, table: Table, met: Meeting | None) -> None:
    if take_in(desk, job):  # an attempt before has searched the batch, and nobody was there: it is planned for it first
        return
    node, plan = table.nodes[start.node], table.plans[job.id]
    claim = f"{job.id}-{secrets.token_hex(4)}"
    if met is not None:
        plan = plan.model_copy(update={"beside": Beside(claim=claim, way=met.way)})
        desk.write_plan(job, plan)
    words = start.words if met is None else met.words
    # The record first: a start that nobody knows of could happen twice.
    job = desk.move(
        job, _S.STARTING, "starting", words, claim=claim, attempt=job.attempt + 1, node=node.name, gpu=start.gpu
    )
    try:
        desk.runner.start(_order(desk, job, start, plan, node))
    except Unreachable:
        raise  # nobody knows whether it began: the next step looks
    except LazytrainError as error:
        fail(desk, job, Failure.UNKNOWN, Outcome(how="died", code=error.code, message=error.message, hint=error.hint))
    except OSError as error:  # its folder is full, or gone
        outcome = Outcome(how="died", message=f"cannot write to {job.run_dir}: {error.strerror or error}")
        fail(desk, job, classify(outcome), outcome)


def _order(desk: Desk, job: Job, start: Start, plan: Admission, node: Node) -> RunOrder:
    way = plan.way(node.kind, job.claim)
    assert way is not None and job.claim is not None
    search = wants_search(desk, job, start.option.seconds)
    train = {**job.spec["train"], "batch": plan.batch}
    spec = {**job.spec, "train": train, "output": {**job.spec["output"], "dir": job.run_dir}}
    return RunOrder(
        job=job.id,
        claim=job.claim,
        attempt=job.attempt,
        spec=spec,
        policy=way.policy,
        device=way.device,
        run_dir=Path(job.run_dir),
        node=node.name,
        gpu=job.gpu or "",
        cpus=max(1.0, node.cpus // max(1.0, node.gpus)),
        host_bytes=int(node.profile.get("host_memory_bytes", 0)),
        search=search_for(job, node) if search else {},
        tracking=_tracking(desk, job, spec, way.policy, node),
    )


def _tracking(desk: Desk, job: Job, spec: Mapping[str, Any], policy: Any, node: Node) -> dict[str, Any]:
    if not desk.config.mlflow_uri:
        return {}
    return {
        "uri": desk.config.mlflow_uri,
        "experiment": desk.config.experiment,
        "run_name": job.name,
        "params": spec,
        "tags": {
            "lazytrain.job_id": job.id,
            "user": job.user,
            "node": node.name,
            "gpu": node.kind,
            "policy_digest": digest(policy),
        },
    }


def _preempt(desk: Desk, job: Job, preempt: Preempt) -> None:
    """Tell a job to save its state and leave: for another one, for a better place, or out of the memory that it keeps
    while it is paused."""
    if job.state is _S.PAUSED:
        job = desk.tell(job, SPILLING, preempt.words)
    else:
        reason = MOVING if preempt.for_job == job.id else PREEMPTED
        job = desk.move(job, _S.PAUSING, reason, preempt.words)
    if job.claim is not None:
        desk.runner.stop(job.claim, JobFiles(job.run_dir).path)


def _wait(desk: Desk, job: Job, wait: Wait) -> None:
    desk.tell(job, wait.code.value, wait.words)


def _unmet(desk: Desk, queued: list[Job]) -> dict[str, set[str]]:
    """The jobs that each queued job waits for; one that waits for a job which did not succeed is rejected instead."""
    wanted = {name for job in queued for name in job.after}
    known = {job.id: job.state for job in desk.store.jobs.list(ids=wanted, removed=True)} if wanted else {}

    def failed(name: str) -> bool:
        return name not in known or (known[name].final and known[name] is not _S.SUCCEEDED)

    def reject(job: Job) -> None:
        first = next(name for name in job.after if failed(name))
        became = known[first].value if first in known else "unknown"
        desk.move(job, _S.REJECTED, "dependency", f"it comes after job {first}, which is {became}")

    desk.for_each([job for job in queued if any(map(failed, job.after))], reject)
    return {
        job.id: {name for name in job.after if known[name] is not _S.SUCCEEDED}
        for job in queued
        if not any(map(failed, job.after))
    }


def _hold(desk: Desk, job: Job, unmet: set[str]) -> None:
    desk.tell(job, WaitCode.DEPENDENCY.value, f"waits for {', '.join(sorted(unmet))} to succeed")
