"""Several runs over each other: their metrics in one plot each, and what differs between their job files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from starlette.responses import Response
from starlette.routing import Route

from ...jobs.errors import InputError, NotFound
from ...platform import facts
from ...platform.artifacts import JOB_ID
from ...platform.schemas import JobView
from ...schedulers import drawing
from ..web import Visit, page
from .masking import masked

MOST = 8
_METRICS = ("loss", "eval_loss", "tokens_per_s", "grad_norm", "learning_rate", "gpu_bytes")
_POINTS = 300
_LISTED = 200
_RAN = ("RUNNING", "PAUSING", "PAUSED", "STOPPING", "RECOVERING", "SUCCEEDED", "FAILED", "STOPPED")
"""States of jobs that may have measured something: a long queue must not crowd them out of the list."""
_SELF_EVIDENT = ("name", "output.dir")


def compare(visit: Visit) -> Response:
    """The page; the jobs are in the address, so that it can be passed on."""
    chosen = list(dict.fromkeys(visit.request.query_params.getlist("job")))
    if not all(JOB_ID.fullmatch(job_id) for job_id in chosen):
        raise NotFound("one of these is no job")
    if len(chosen) > MOST:
        raise InputError(f"{len(chosen)} jobs are too many for one picture", hint=f"choose {MOST} at most")
    jobs: list[JobView] = [visit.read("job", job_id, fresh_s=3.0) for job_id in chosen]
    listed: list[JobView] = visit.read("jobs", states=_RAN, limit=_LISTED, fresh_s=5.0)
    wanted = visit.asked("find").strip().lower()
    return visit.show(
        "compare.html",
        jobs=jobs,
        chosen=chosen,
        most=MOST,
        find=visit.asked("find"),
        listed=[job for job in listed if job.attempt and wanted in f"{job.name} {job.user} {job.id}".lower()][:60],
        drawn=_drawn(visit, jobs) if jobs else [],
        differences=differences(jobs),
    )


def _drawn(visit: Visit, jobs: Sequence[JobView]) -> list[Markup]:
    labels = labels_of(jobs)
    key = ("compare", *labels)
    series = visit.once(key, lambda: facts.run_series(visit.client, labels, _METRICS, points=_POINTS), fresh_s=4.0)
    return [Markup(drawing.draw_series(plot)) for plot in series.values() if plot.lines]


def labels_of(jobs: Sequence[JobView]) -> dict[str, str]:
    """Jobs by name, and by id too where names are equal."""
    names = [job.name for job in jobs]
    return {job.id: job.name if names.count(job.name) == 1 else f"{job.name} ({job.id})" for job in jobs}


def differences(jobs: Sequence[JobView]) -> list[tuple[str, list[Any]]]:
    """Keys of the job files that are not the same in all of them, with each job's value."""
    flat = [dict(_flat(masked(job.spec or {}))) for job in jobs]
    keys = list(dict.fromkeys(key for values in flat for key in values if key not in _SELF_EVIDENT))
    rows = [(key, [values.get(key) for values in flat]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def _flat(value: Any, key: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [leaf for name, inner in value.items() for leaf in _flat(inner, f"{key}.{name}" if key else str(name))]
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return [leaf for index, item in enumerate(value) for leaf in _flat(item, f"{key}[{index}]")]
    return [(key, value)]


routes = [Route("/compare", page(compare))]
