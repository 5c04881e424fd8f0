"""Routes of a job's files: log, metrics, policy, timeline, checkpoints. Only what lies in the job's own folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path as File
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field

from ...jobs.errors import NotFound
from .. import schemas
from ..artifacts import MOST_LOG_BYTES, JobFiles, as_text, inside, last_lines, read_json, read_log, read_rows
from ..store import Job
from .access import StoreOf, VisibleJob
from .plans import Plans
from .series import SeriesReader
from .views import finite

router = APIRouter(tags=["files"])

_Offset = Annotated[int | None, Query(ge=0, le=2**62)]
_MetricName = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,100}$")]
_CHECKPOINT = re.compile(r"step-(\d{8,})-\d{6,}")


@router.get("/jobs/{job_id}/logs")
def logs(
    job: VisibleJob,
    tail: Annotated[int | None, Query(ge=1, le=100_000)] = None,
    offset: _Offset = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LOG_BYTES)] = 64 << 10,
    attempt: Annotated[int | None, Query(ge=1, le=1_000_000)] = None,
) -> schemas.LogPart:
    """What a run printed: its end, its last ``tail`` lines, or on from ``offset``."""
    number = attempt or job.attempt
    path = JobFiles(job.run_dir).attempt(number).log
    if not _readable(job, path):
        return schemas.LogPart(text="", offset=0, attempt=number)
    text, behind = read_log(path, offset=offset, limit=limit)
    if tail is not None and offset is None:
        text = last_lines(path, tail)
    return schemas.LogPart(text=as_text(text.encode("utf-8", "replace")), offset=behind, attempt=number)


@router.get("/jobs/{job_id}/metrics")
def metrics(
    job: VisibleJob,
    offset: Annotated[int, Query(ge=0, le=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=4 << 20)] = 1 << 20,
) -> schemas.MetricsPart:
    """Rows of the metric log from byte ``offset`` on, at most ``limit`` bytes of them."""
    path = JobFiles(job.run_dir).metrics
    rows, behind = (
        read_rows(path, offset=offset, limit_bytes=max(limit, 4096)) if _readable(job, path) else ([], offset)
    )
    return schemas.MetricsPart(rows=finite(rows), offset=behind)


@router.get("/jobs/{job_id}/series")
def series(
    job: VisibleJob,
    request: Request,
    name: Annotated[list[_MetricName], Query(min_length=1, max_length=20)],
    points: Annotated[int, Query(ge=2, le=5000)] = 400,
) -> schemas.SeriesAnswer:
    """Metrics by name over the steps, each thinned to about ``points`` points: no peak and no gap is lost."""
    path = JobFiles(job.run_dir).metrics
    if not _readable(job, path):
        return schemas.SeriesAnswer(series={})
    reader: SeriesReader = request.app.state.series
    return reader.read(path, name, points)


@router.get("/jobs/{job_id}/policy")
def policy(job: VisibleJob) -> dict[str, Any]:
    """What was planned for the job, as it runs."""
    return _record(job, JobFiles(job.run_dir).policy, "policy")


@router.get("/jobs/{job_id}/timeline")
def timeline(
    job: VisibleJob, request: Request, store: StoreOf, kind: Literal["measured", "predicted"] = "measured"
) -> dict[str, Any]:
    """The timeline of a step as it was measured, or as the simulator expects it on the job's node."""
    if kind == "measured":
        return _record(job, JobFiles(job.run_dir).timeline, "timeline")
    found = _record(job, JobFiles(job.run_dir).policy, "policy")
    profile = store.nodes.get(job.node).profile if job.node else None
    if not profile:
        raise NotFound(f"the node of job {job.id} is not measured")
    plans: Plans = request.app.state.plans
    return plans.question("timeline", {"spec": dict(job.spec), "policy": found, "profile": dict(profile)})


@router.get("/jobs/{job_id}/checkpoints")
def checkpoints(
    job: VisibleJob, since: Annotated[int, Query(ge=0, le=2**62)] = 0, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> schemas.CheckpointPage:
    """Checkpoints by step, from the ``since``-th on; incomplete ones are marked, not left out."""
    found = sorted(_checkpoints(JobFiles(job.run_dir).checkpoints), key=lambda c: (c.step, c.name))
    page = found[since : since + limit]
    return schemas.CheckpointPage(checkpoints=page, next=since + limit if since + limit < len(found) else None)


def _checkpoints(folder: File) -> Iterator[schemas.CheckpointView]:
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _CHECKPOINT.fullmatch(path.name)
        if match:
            yield schemas.CheckpointView(
                name=path.name, step=int(match[1]), complete=read_json(path / "manifest.json") is not None
            )


def _record(job: Job, path: File, what: str) -> dict[str, Any]:
    record = read_json(path) if _readable(job, path) else None
    if record is None:
        raise NotFound(f"job {job.id} has no {what} yet", hint="it is written when the training begins")
    found: dict[str, Any] = finite(record)
    return found


def _readable(job: Job, path: File) -> bool:
    """A link that a job left in its folder must not lead out of it."""
    return JobFiles(job.run_dir).belongs_to(job.id) and path.is_file() and inside(path, File(job.run_dir))
