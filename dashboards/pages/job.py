"""One job: how it goes, why it is as fast as it is, what it printed, what it leaves behind."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from markupsafe import Markup
from starlette.responses import Response
from starlette.routing import Route

from ...jobs.errors import LazytrainError, NotFound
from ...platform import facts
from ...platform.schemas import EventView, JobView
from ...schedulers import drawing
from ..web import Visit, page
from . import logs
from .masking import masked_yaml

TABS = {
    "training": "Training",
    "plan": "Plan",
    "log": "Log",
    "checkpoints": "Checkpoints",
    "file": "Job file",
    "history": "History",
}
FINAL = ("SUCCEEDED", "FAILED", "STOPPED", "REJECTED")
_POINTS = 400


def job(visit: Visit) -> Response:
    """The page; what only another tab shows is not asked for."""
    found: JobView = visit.read("job", visit.job_id, fresh_s=1.0)
    tab = visit.asked("tab", "training")
    if tab not in TABS:
        raise NotFound("a job has no such page")
    more = {} if visit.part == "head" else _COLLECT[tab](visit, found)
    return visit.show("job.html", job=found, tab=tab, tabs=TABS, final=found.state in FINAL, **more)


def _training(visit: Visit, job: JobView) -> dict[str, Any]:
    times = visit.once(("times", job.id), lambda: facts.step_times(visit.client, job.id, points=_POINTS))
    series = visit.once(
        ("series", job.id), lambda: facts.run_series(visit.client, {job.id: job.name}, facts.METRICS, points=_POINTS)
    )
    drawn = [drawing.draw_series(plot) for plot in series.values() if plot.lines]
    if times.plot.lines:
        drawn.append(drawing.draw_series(times.plot))
    failed = job.state == "FAILED"
    last = visit.read("log", job.id, tail=12, fresh_s=5.0).text if failed else ""
    return {"times": times, "series": series, "drawn": [Markup(html) for html in drawn], "last_lines": last}


def _plan(visit: Visit, job: JobView) -> dict[str, Any]:
    policy = visit.once(("policy", job.id), lambda: _if_there(lambda: visit.client.policy(job.id)), fresh_s=10.0)
    if visit.part == "timelines" and policy is not None:
        return {"policy": policy, **_timelines(visit, job)}
    drawn = drawing.draw_policy_map(facts.map_of(policy.model_dump(mode="json", by_alias=True))) if policy else ""
    return {"policy": policy, "map": Markup(drawn), **_timelines(visit, job, wait=False)}


def _timelines(visit: Visit, job: JobView, *, wait: bool = True) -> dict[str, Any]:
    """Predicted above measured. The prediction may take a while, and what keeps it away does not hide the rest."""
    measured = visit.once(("measured", job.id), lambda: _if_there(lambda: _timeline(visit, job)), fresh_s=10.0)
    predicted, why = None, ""
    try:
        if wait:
            predicted = visit.once(("predicted", job.id), lambda: _timeline(visit, job, predicted=True), 600.0)
    except LazytrainError as error:
        why = error.message
    drawn = Markup(drawing.draw_timelines(predicted, measured)) if predicted or measured else ""
    return {"timelines": drawn, "waits": not wait, "why": why, "exposed": _exposed(predicted, measured)}


def _timeline(visit: Visit, job: JobView, *, predicted: bool = False) -> Any:
    return facts.timeline_of(visit.client.timeline(job.id, predicted=predicted).to_dict())


def _exposed(predicted: Any, measured: Any) -> dict[str, tuple[float | None, float | None]]:
    """Seconds for which computing waits, by stream, as predicted and as measured."""
    known = [plot.exposed_s() if plot is not None else {} for plot in (predicted, measured)]
    return {stream: (known[0].get(stream), known[1].get(stream)) for stream in {**known[0], **known[1]}}


def _checkpoints(visit: Visit, job: JobView) -> dict[str, Any]:
    found = visit.read("checkpoints", job.id)
    return {"checkpoints": list(reversed(found)), "export": export_command(job)}


def export_command(job: JobView, step: int | None = None) -> str:
    """What writes the trained model as a Hugging Face folder."""
    chosen = f" --checkpoint {step}" if step is not None else ""
    return f"lazytrain export {shlex.quote(job.run_dir)} --out {shlex.quote(job.name)}{chosen}"


def _file(visit: Visit, job: JobView) -> dict[str, Any]:
    return {"text": masked_yaml(job.spec or {})}


def _history(visit: Visit, job: JobView) -> dict[str, Any]:
    events: list[EventView] = visit.read("events", job.id)
    return {"events": list(reversed(events))}


def _if_there(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except NotFound:
        return None


_COLLECT: dict[str, Callable[[Visit, JobView], dict[str, Any]]] = {
    "training": _training,
    "plan": _plan,
    "log": logs.collect,
    "checkpoints": _checkpoints,
    "file": _file,
    "history": _history,
}


def export_script(visit: Visit) -> Response:
    """The export command as a file."""
    found: JobView = visit.read("job", visit.job_id)
    step = visit.asked("step")
    chosen = int(step) if step.isascii() and step.isdigit() and len(step) < 19 else None
    headers = {"content-disposition": f'attachment; filename="export-{found.id}.sh"'}
    return Response(f"#!/bin/sh\n{export_command(found, chosen)}\n", media_type="text/x-shellscript", headers=headers)


routes = [
    Route("/jobs/{job}", page(job)),
    Route("/jobs/{job}/export.sh", page(export_script)),
    Route("/jobs/{job}/log.txt", page(logs.whole)),
]
