"""Facts of what jobs report: metrics over steps, step time against its prediction, the policy's map, the timeline."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...jobs.errors import NotFound
from ...jobs.policy import Policy
from ...jobs.timeline import Timeline
from ...schedulers.drawing import (
    MOST_POINTS,
    Line,
    PolicyMap,
    SeriesPlot,
    TimelinePlot,
    line,
    policy_map,
    series_plot,
    timeline_plot,
)
from ..client import Client
from ..schemas import SeriesView


@dataclass(frozen=True, slots=True)
class Metric:
    """How a metric of the log is drawn."""

    title: str
    unit: str = ""
    log: bool = False


METRICS: Mapping[str, Metric] = {
    "loss": Metric("Loss"),
    "eval_loss": Metric("Evaluation loss"),
    "learning_rate": Metric("Learning rate"),
    "grad_norm": Metric("Gradient norm", log=True),
    "tokens_per_s": Metric("Throughput", "tokens/s"),
}
"""What a job's page shows; others are drawn under their own names."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured seconds of the steps against what the plan predicted."""

    plot: SeriesPlot
    measured_s: float | None
    """Median of the drawn steps."""
    predicted_s: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted: above 1 the step is slower than was predicted."""
        return self.measured_s / self.predicted_s if self.measured_s and self.predicted_s else None

    @property
    def words(self) -> str:
        """The comparison for people."""
        if self.measured_s is None:
            return "No step has been measured yet."
        if self.ratio is None:
            return "Nothing was predicted for this job."
        share = abs(self.ratio - 1)
        return f"A step takes {share:.1%} {'more' if self.ratio > 1 else 'less'} time than predicted."


def run_series(
    client: Client, runs: Mapping[str, str], metrics: Iterable[str], *, points: int = MOST_POINTS
) -> dict[str, SeriesPlot]:
    """Metrics of one or more jobs, each as a plot with one line a job.

    ``runs`` gives each job id its label. One request a job. Raises NotFound for a job that one may not see.
    """
    names = list(metrics)
    answers = {job_id: client.series(job_id, names, points=points).series for job_id in runs}
    return {
        name: _plot(name, {runs[job_id]: found[name] for job_id, found in answers.items() if name in found})
        for name in names
    }


def _plot(name: str, found: Mapping[str, SeriesView]) -> SeriesPlot:
    metric = METRICS.get(name) or Metric(name)
    lines = [_line(label, view) for label, view in found.items()]
    return series_plot(metric.title, lines, unit=metric.unit, log=metric.log)


def _line(label: str, view: SeriesView) -> Line:
    return line(label, view.steps, view.values, most=max(len(view.steps), 1), count=view.count)


def step_times(client: Client, job_id: str, *, points: int = MOST_POINTS) -> StepTimes:
    """The seconds of each step, beside what the plan predicted."""
    found = client.series(job_id, ("step_s", "predicted_step_s"), points=points).series
    views = {"measured": found.get("step_s"), "predicted": found.get("predicted_step_s")}
    lines = [_line(label, view) for label, view in views.items() if view is not None]
    return StepTimes(series_plot("Step time", lines, unit="s"), _median(views["measured"]), _median(views["predicted"]))


def _median(view: SeriesView | None) -> float | None:
    values = [value for value in view.values if value is not None] if view is not None else []
    return statistics.median(values) if values else None


def job_map(client: Client, job_id: str) -> PolicyMap | None:
    """The map of the policy that the job runs by; None before it began."""
    try:
        return policy_map(client.policy(job_id))
    except NotFound:
        return None


def map_of(policy: Mapping[str, Any]) -> PolicyMap:
    """The map of a policy file's content, as plans have it. Raises ValueError for what is no policy."""
    return policy_map(Policy.model_validate(policy))


def job_timelines(client: Client, job_id: str) -> tuple[TimelinePlot | None, TimelinePlot | None]:
    """A step as it is predicted and as it was measured; None for each that is not there (yet)."""
    return _timeline(client, job_id, predicted=True), _timeline(client, job_id, predicted=False)


def _timeline(client: Client, job_id: str, *, predicted: bool) -> TimelinePlot | None:
    try:
        return timeline_plot(client.timeline(job_id, predicted=predicted))
    except NotFound:
        return None


def timeline_of(record: Mapping[str, Any] | None) -> TimelinePlot | None:
    """The timeline of a plan's answer, which may have none."""
    return timeline_plot(Timeline.from_dict(record)) if record is not None else None
