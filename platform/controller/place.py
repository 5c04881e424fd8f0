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
from ...schedulers.placement import Decisions, Preempt, Start, Wait, WaitCode
from ..admission import Admission
from ..artifacts import JobFiles
from ..cluster.runs import Outcome, RunOrder
from ..store import Job, Node
from .admission import STAGE
from .desk import ACTIVE, MOVING, PREEMPTED, SPILLING, Desk
from .endings import fail
from .failures import Failure
from .question import Table, fingerprint, question
from .searched import search_for, take_in, wants_search

log = logging.getLogger(__name__)
_S = JobState
_AGAIN_S = 30.0
"""Placement that had nothing to do is asked again after this time, or as soon as anything is different."""


def place(desk: Desk) -> None:
    """Start what can start now, preempt what has to make room, and tell everybody else why they wait."""
    table = _table(desk)
    if not table.waiting and not table.running:
        return
    asked = question(desk, table)
    seen = fingerprint(asked)
    if seen == desk.notes.settled and desk.clock() - desk.notes.settled_at < _AGAIN_S:
        return
    decisions = desk.decide(asked)
    _act(desk, decisions, table)
    settled = not decisions.starts and not decisions.preempts
    desk.notes.settled, desk.notes.settled_at = (seen if settled else None), desk.clock()


def _table(desk: Desk) -> Table:
    """Who waits for a place, and who has one; jobs that wait for others which are not at the table hear so."""
    jobs = list(reversed(desk.store.jobs.list(states=[_S.QUEUED, _S.PAUSED, *ACTIVE])))
    queued = [job for job in jobs if job.state is _S.QUEUED]
    unmet = _unmet(desk, queued)
    plans = {
        job_id: Admission.model_validate(plan)
        for job_id, plan in desk.store.jobs.stages_of((job.id for job in jobs), STAGE).items()
    }
    ready = {job.id: job for job in queued if job.id in plans and job.id in unmet and job.not_before <= desk.clock()}
    nodes = {node.name: node for node in desk.store.nodes.list()}
    running = {job.id: job for job in jobs if _has_a_place(job) and job.node in nodes and job.id in plans}
    held = {job.id: job for job in ready.values() if not unmet[job.id] <= {*ready, *running}}
    desk.for_each(held.values(), lambda job: _hold(desk, job, unmet[job.id]))
    waiting = {name: job for name, job in ready.items() if name not in held}
    return Table(waiting, running, plans, nodes, unmet)


def _has_a_place(job: Job) -> bool:
    """Whether it holds something of a node: a GPU, or only memory while it is paused, or leaves after that."""
    return job.state is not _S.QUEUED and bool(job.gpu or job.claim)


def _act(desk: Desk, decisions: Decisions, table: Table) -> None:
    starts = {start.job: start for start in decisions.starts}
    waits = {wait.job: wait for wait in decisions.waits}
    preempts = {preempt.job: preempt for preempt in decisions.preempts}
    ready, running = table.waiting, table.running
    desk.for_each((ready[name] for name in starts), lambda job: _start(desk, job, starts[job.id], table))
    desk.for_each((running[name] for name in preempts), lambda job: _preempt(desk, job, preempts[job.id]))
    desk.for_each((ready[name] for name in waits if name in ready), lambda job: _wait(desk, job, waits[job.id]))


# ---- the answer


def _start(desk: Desk, job: Job, start: Start, table: Table) -> None:
    if take_in(desk, job):  # an attempt before has searched the batch, and nobody was there: it is planned for it first
        return
    node, plan = table.nodes[start.node], table.plans[job.id]
    claim = f"{job.id}-{secrets.token_hex(4)}"
    # The record first: a start that nobody knows of could happen twice.
    job = desk.move(
        job, _S.STARTING, "starting", start.words, claim=claim, attempt=job.attempt + 1, node=node.name, gpu=start.gpu
    )
    try:
        desk.runner.start(_order(desk, job, claim, plan, node))
    except Unreachable:
        raise  # nobody knows whether it began: the next step looks
    except LazytrainError as error:
        fail(desk, job, Failure.UNKNOWN, Outcome(how="died", code=error.code, message=error.message, hint=error.hint))


def _order(desk: Desk, job: Job, claim: str, plan: Admission, node: Node) -> RunOrder:
    way = plan.ways[node.kind]
    train = {**job.spec["train"], "batch": plan.batch}
    spec = {**job.spec, "train": train, "output": {**job.spec["output"], "dir": job.run_dir}}
    return RunOrder(
        job=job.id,
        claim=claim,
        attempt=job.attempt,
        spec=spec,
        policy=way.policy,
        device=way.device,
        run_dir=Path(job.run_dir),
        node=node.name,
        gpu=job.gpu or "",
        cpus=max(1.0, node.cpus // max(1.0, node.gpus)),
        host_bytes=int(node.profile.get("host_memory_bytes", 0)),
        search=search_for(job, node) if wants_search(desk, job) else {},
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
