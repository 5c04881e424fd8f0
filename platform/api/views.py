"""Stored values as answers."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from ...jobs.lifecycle import JobState
from .. import schemas
from ..admission import STAGE
from ..artifacts import JobFiles, inside, read_json, read_log, read_record
from ..cluster.runs import Beat
from ..store import Event, Job, Node, Store, User
from .access import sees_all

ON_NODES = (JobState.STARTING, JobState.RUNNING, JobState.PAUSING, JobState.STOPPING, JobState.RECOVERING)
"""States in which a job holds a GPU."""
_STEP_FIGURES = ("tokens_per_s", "predicted_step_s", "loss", "gpu_bytes")
_RUN_ID = re.compile(r"[0-9a-zA-Z_-]{1,64}")
_HUGE = 1e300
"""What is beyond is no measurement, and an integer there is no float either."""
_END_BYTES = 8 << 10
"""Enough of a metric log's end to hold some steps."""


def job_view(job: Job, *, spec: bool = False, mlflow_pages: str = "") -> schemas.JobView:
    """A job; with its job file, and its run in MLflow, where it is asked for alone."""
    fields = {name: getattr(job, name) for name in schemas.JobView.model_fields if hasattr(job, name)}
    fields["state"] = job.state.value
    fields["after"] = list(job.after)
    fields["outcome"] = finite(dict(job.outcome))
    if spec:
        fields["spec"] = dict(job.spec)
        fields["calibration"] = _calibration(JobFiles(job.run_dir))
        fields["mlflow_run"] = run = _mlflow_run(JobFiles(job.run_dir))
        fields["mlflow_url"] = f"{mlflow_pages.rstrip('/')}/#/runs/{run}" if run and mlflow_pages else None
    # A list of jobs that have ended is not worth a file for each of them.
    return schemas.JobView(**fields, progress=progress_of(job) if spec or not job.state.final else None)


def _calibration(files: JobFiles) -> schemas.Calibration | None:
    return read_record(schemas.Calibration, files.calibration) if inside(files.calibration, files.path) else None


def _mlflow_run(files: JobFiles) -> str | None:
    record = read_json(files.mlflow) if inside(files.mlflow, files.path) else None
    run = record.get("run_id") if record else None
    return run if isinstance(run, str) and _RUN_ID.fullmatch(run) else None


def progress_of(job: Job) -> schemas.Progress | None:
    """How far the job's last attempt is, as its training process said last; None before the first word."""
    if not job.attempt:
        return None
    files = JobFiles(job.run_dir)
    beat = read_record(Beat, files.attempt(job.attempt).beat)
    if beat is None:
        return None
    last = _last_step(files.metrics) if inside(files.metrics, files.path) else {}
    known = {name: float(value) for name in _STEP_FIGURES if _is_figure(value := last.get(name))}
    return schemas.Progress(step=beat.step, total_steps=beat.total_steps, step_s=beat.step_s, **known)


def _is_figure(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) <= _HUGE


def _last_step(metrics: Path) -> dict[str, Any]:
    """The newest row of the metric log that is about a step of training."""
    text, _ = read_log(metrics, limit=_END_BYTES)
    for line in reversed(text.split("\n")):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line) if '"tokens_per_s"' in line else None
            if isinstance(row, dict):
                return row
    return {}


def event_view(event: Event) -> schemas.EventView:
    """An event."""
    return schemas.EventView(
        id=event.id,
        time=event.time,
        kind=event.kind,
        state=event.state,
        reason=event.reason,
        sentence=event.sentence,
    )


def node_views(store: Store, nodes: Iterable[Node], user: User | None) -> list[schemas.NodeView]:
    """Nodes, with what all jobs there hold, and which of them the user may see: for nobody, none."""
    jobs = store.jobs.list(states=ON_NODES, specs=False)
    plans = store.jobs.stages_of((job.id for job in jobs), STAGE)
    return [_node_view(node, [job for job in jobs if job.node == node.name], plans, user) for node in nodes]


def _node_view(
    node: Node, jobs: Sequence[Job], plans: Mapping[str, Mapping[str, Any]], user: User | None
) -> schemas.NodeView:
    fields = {name: getattr(node, name) for name in schemas.NodeView.model_fields if hasattr(node, name)}
    fields["profile"] = finite(dict(node.profile))
    ways = [_way(plans[job.id], node.kind, job.claim) for job in jobs if job.id in plans]
    return schemas.NodeView(
        **fields,
        busy=len(jobs),
        held_host_bytes=sum(way.get("option", {}).get("host_bytes", 0) for way in ways),
        held_nvme_bytes=sum(way.get("option", {}).get("nvme_bytes", 0) for way in ways),
        jobs=[job.id for job in jobs if user is not None and _shown(job, user)],
    )


def _way(plan: Mapping[str, Any], kind: str, claim: str | None) -> Mapping[str, Any]:
    """As `Admission.way`, for a plan that is not looked at any further."""
    beside = plan.get("beside")
    found: Mapping[str, Any] = beside["way"] if beside and beside["claim"] == claim else plan["ways"].get(kind, {})
    return found


def _shown(job: Job, user: User) -> bool:
    return job.user == user.name or sees_all(user)


def queue_entry(job: Job, user: User, expected: Mapping[str, tuple[float | None, float | None]]) -> schemas.QueueEntry:
    """A job in the queue, without what the user may not see of it; ``expected`` are start and end of waiting jobs."""
    shown = _shown(job, user)
    progress = progress_of(job) if shown and job.state is not JobState.QUEUED else None
    start, end = expected.get(job.id, (None, None))
    return schemas.QueueEntry(
        id=job.id if shown else None,
        user=job.user if shown else None,
        state=job.state.value,
        priority=job.priority,
        reason=job.reason if shown else "",
        sentence=job.sentence if shown else "",
        queued_at=job.queued_at,
        name=job.name if shown else None,
        node=job.node if shown else None,
        started_at=job.started_at if shown else None,
        attempt=job.attempt if shown else 0,
        expected_start=start,
        expected_end=_end(progress, time.time()) if progress and job.state is JobState.RUNNING else end,
        progress=progress,
    )


def _end(progress: schemas.Progress, now: float) -> float | None:
    """When a running job has taken all of its steps, at the pace that it has."""
    left = progress.total_steps - progress.step
    return now + left * progress.step_s if progress.step_s and left > 0 else None


def finite(value: Any) -> Any:
    """The value with null in place of every number that JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return value
