"""Asking placement, and doing what it decides."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...jobs.errors import LazytrainError, Unreachable
from ...jobs.frozen import digest
from ...jobs.lifecycle import JobState
from ...schedulers.placement import (
    Decisions,
    Gpu,
    NodeState,
    Option,
    Preempt,
    Question,
    RunningJob,
    Start,
    Wait,
    WaitCode,
    WaitingJob,
)
from ..admission import STAGE, Admission
from ..artifacts import JobFiles
from ..cluster.runs import Outcome, RunOrder
from ..store import Job, Node
from .desk import ACTIVE, Desk
from .endings import fail
from .failures import Failure

log = logging.getLogger(__name__)
_S = JobState
_FORETELL_EVERY_S = 5.0
_OPTION_FIELDS = {field.name for field in fields(Option)}


def place(desk: Desk) -> None:
    """Start what can start now, preempt what has to make room, and tell everybody else why they wait."""
    jobs = list(reversed(desk.store.jobs.list(states=[_S.QUEUED, *ACTIVE])))
    queued = [job for job in jobs if job.state is _S.QUEUED]
    unmet = _unmet(desk, queued)
    plans = {
        job_id: Admission.model_validate(plan)
        for job_id, plan in desk.store.jobs.stages_of((job.id for job in jobs), STAGE).items()
    }
    ready = {job.id: job for job in queued if job.id in plans and job.id in unmet and job.not_before <= desk.clock()}
    nodes = {node.name: node for node in desk.store.nodes.list()}
    running = {job.id: job for job in jobs if job.state in ACTIVE and job.node in nodes and job.gpu and job.id in plans}
    held = {job.id: job for job in ready.values() if not unmet[job.id] <= {*ready, *running}}
    desk.for_each(held.values(), lambda job: _hold(desk, job, unmet[job.id]))
    ready = {name: job for name, job in ready.items() if name not in held}
    if not ready:
        return
    decisions = desk.decide(_question(desk, ready, running, plans, nodes, unmet))
    _act(desk, decisions, ready, running, plans, nodes)


def _act(
    desk: Desk,
    decisions: Decisions,
    ready: Mapping[str, Job],
    running: Mapping[str, Job],
    plans: Mapping[str, Admission],
    nodes: Mapping[str, Node],
) -> None:
    starts = {start.job: start for start in decisions.starts}
    waits = {wait.job: wait for wait in decisions.waits}
    preempts = {preempt.job: preempt for preempt in decisions.preempts}
    desk.for_each((ready[name] for name in starts), lambda job: _start(desk, job, starts[job.id], plans[job.id], nodes))
    desk.for_each((running[name] for name in preempts), lambda job: _preempt(desk, job, preempts[job.id]))
    desk.for_each((ready[name] for name in waits if name in ready), lambda job: _wait(desk, job, waits[job.id]))
    _foretell(desk, decisions)


def _foretell(desk: Desk, decisions: Decisions) -> None:
    """Let people know when their jobs are expected to run; now and then, because it changes all the time."""
    now = desk.clock()
    if now - desk.notes.foretold_at >= _FORETELL_EVERY_S:
        desk.store.forecasts.put({wait.job: (wait.start_s, wait.end_s) for wait in decisions.waits}, now)
        desk.notes.foretold_at = now


# ---- the question


def _question(
    desk: Desk,
    ready: Mapping[str, Job],
    running: Mapping[str, Job],
    plans: Mapping[str, Admission],
    nodes: Mapping[str, Node],
    unmet: Mapping[str, set[str]],
) -> Question:
    return Question(
        now_s=desk.clock(),
        waiting=tuple(_waiting(job, plans[job.id], nodes, unmet[job.id]) for job in ready.values()),
        running=tuple(_running(desk, job, plans[job.id], nodes) for job in running.values()),
        nodes=tuple(_node_state(node) for node in nodes.values() if node.alive or _holds(node, running)),
        rules=desk.config.rules,
    )


def _holds(node: Node, running: Mapping[str, Job]) -> bool:
    return any(job.node == node.name for job in running.values())


def _waiting(job: Job, plan: Admission, nodes: Mapping[str, Node], unmet: set[str]) -> WaitingJob:
    return WaitingJob(
        id=job.id,
        user=job.user,
        priority=job.priority,
        submitted_s=job.queued_at,
        options=tuple(_option(way.option, _share_left(job, plan)) for way in plan.ways.values()),
        after=tuple(sorted(unmet)),
        nodes=tuple(name for name in nodes if name not in job.avoid) if job.avoid else (),
        limits=plan.limits,
    )


def _option(stored: Mapping[str, Any], share: float) -> Option:
    known = {name: value for name, value in stored.items() if name in _OPTION_FIELDS}
    return Option(**{**known, "work_tokens": known["work_tokens"] * share})


def _share_left(job: Job, plan: Admission) -> float:
    done = job.outcome.get("step", 0) if job.attempt else 0
    return max(0.0, 1.0 - done / plan.steps)


def _running(desk: Desk, job: Job, plan: Admission, nodes: Mapping[str, Node]) -> RunningJob:
    assert job.node is not None
    way = plan.ways.get(nodes[job.node].kind) or next(iter(plan.ways.values()))
    option = _option(way.option, 1.0)
    look = desk.notes.looks.get(job.claim or "")
    seconds_per_step = (look.step_s if look else 0.0) or option.seconds / plan.steps
    left = plan.steps - (look.step if look else 0)
    started_s = job.updated_at if job.state is _S.STARTING else (job.started_at or job.updated_at)
    leaving = job.state in (_S.PAUSING, _S.STOPPING, _S.RECOVERING)
    return RunningJob(
        id=job.id,
        user=job.user,
        priority=job.priority,
        node=job.node,
        gpu=job.gpu,
        option=option,
        started_s=started_s,
        waited_s=max(0.0, started_s - job.queued_at),
        remaining_s=desk.config.stop_timeout_s if leaving else max(0.0, left * seconds_per_step),
        preemptible=job.state is _S.RUNNING,
        stopping=leaving,
    )


def _node_state(node: Node) -> NodeState:
    profile = node.profile
    return NodeState(
        name=node.name,
        kind=node.kind,
        gpus=tuple(Gpu(id=str(index)) for index in range(int(node.gpus))),
        host_bytes=int(profile.get("host_memory_bytes", 0)),
        nvme_bytes=int(profile.get("nvme_bytes", 0)),
        dram_bytes_s=float(profile.get("host_bytes_s", 0.0)),
        pcie_bytes_s=min(float(profile.get("h2d_bytes_s", 0.0)), float(profile.get("d2h_bytes_s", 0.0))),
        nvme_read_bytes_s=float(profile.get("nvme_read_bytes_s", 0.0)),
        nvme_write_bytes_s=float(profile.get("nvme_write_bytes_s", 0.0)),
        drained=node.drained,
        excluded=_excluded(node),
    )


def _excluded(node: Node) -> str:
    if not node.alive:
        return "it is not there any more"
    return "" if node.profile else "it is being measured"


# ---- the answer


def _start(desk: Desk, job: Job, start: Start, plan: Admission, nodes: Mapping[str, Node]) -> None:
    node = nodes[start.node]
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
    job = desk.move(job, _S.PAUSING, "preempted", preempt.words)
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
