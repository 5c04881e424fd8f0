"""Stored values as answers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from .. import schemas
from ..artifacts import JobFiles, read_json
from ..store import Event, Job, Node, User
from .access import sees_all


def job_view(job: Job, *, spec: bool = False) -> schemas.JobView:
    """A job; with its job file where it is asked for alone."""
    fields = {name: getattr(job, name) for name in schemas.JobView.model_fields if hasattr(job, name)}
    fields["state"] = job.state.value
    fields["after"] = list(job.after)
    fields["outcome"] = finite(dict(job.outcome))
    fields["spec"] = dict(job.spec) if spec else None
    # A list of jobs that have ended is not worth a file for each of them.
    return schemas.JobView(**fields, progress=_progress(job) if spec or not job.state.final else None)


def _progress(job: Job) -> schemas.Progress | None:
    if not job.attempt:
        return None
    beat = read_json(JobFiles(job.run_dir).attempt(job.attempt).beat)
    return schemas.Progress(**finite({k: beat[k] for k in ("step", "total_steps", "step_s")})) if beat else None


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


def node_view(node: Node, jobs: Iterable[Job]) -> schemas.NodeView:
    """A node, with those of ``jobs`` that run there."""
    fields = {name: getattr(node, name) for name in schemas.NodeView.model_fields if hasattr(node, name)}
    fields["profile"] = finite(dict(node.profile))
    here = [job.id for job in jobs if job.node == node.name]
    return schemas.NodeView(**fields, measured=bool(node.profile), jobs=here)


def queue_entry(job: Job, user: User) -> schemas.QueueEntry:
    """A job in the queue, without what the user may not see of it."""
    shown = job.user == user.name or sees_all(user)
    return schemas.QueueEntry(
        id=job.id if shown else None,
        user=job.user if shown else None,
        state=job.state.value,
        priority=job.priority,
        reason=job.reason if shown else "",
        sentence=job.sentence if shown else "",
        queued_at=job.queued_at,
    )


def finite(value: Any) -> Any:
    """The value with null in place of every number that JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return value
