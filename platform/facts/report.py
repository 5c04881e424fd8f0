"""All plots of one job as one HTML file, which opens without a server."""

from __future__ import annotations

import time

from ...schedulers.drawing import document, draw_policy_map, draw_series, draw_timelines, grid
from ..client import Client
from ..schemas import JobView
from .runs import METRICS, job_map, job_timelines, run_series, step_times


def job_report(client: Client, job: JobView) -> str:
    """The file's text: state, metrics, step time against its prediction, policy map, timeline."""
    times = step_times(client, job.id)
    plots = run_series(client, {job.id: job.name}, METRICS)
    parts = [grid(draw_series(plot) for plot in (*plots.values(), times.plot))]
    policy = job_map(client, job.id)
    if policy is not None:
        parts.append(draw_policy_map(policy))
    parts.append(draw_timelines(*job_timelines(client, job.id)))
    return document(f"{job.name} ({job.id})", {**_figures(job), "step time": times.words}, parts)


def _figures(job: JobView) -> dict[str, str]:
    figures = {"state": job.state, "why": job.sentence, "user": job.user, "node": job.node or "none yet"}
    if job.progress is not None and job.progress.total_steps:
        figures["step"] = f"{job.progress.step} of {job.progress.total_steps}"
    figures["submitted"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.created_at))
    return figures
