"""``lazytrain tune``: search the batch size with real probes on Ray Tune."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from ...jobs.units import MOST_ROWS, format_bytes
from ..settings import Settings
from . import options
from .output import Bars, Output
from .tables import seconds

if TYPE_CHECKING:
    from ...jobs.spec import JobSpec
    from ..tuning import Search

EPILOG = "Example:  lazytrain tune job.yaml --device emulated:RTX3090 --most-probes 3"


def command(
    spec: options.Spec,
    objective: Annotated[Literal["throughput", "max_batch"], typer.Option(help="What is best.")] = "throughput",
    device: Annotated[str, typer.Option(help="auto, cuda or emulated:GPU.")] = "auto",
    low: Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="Smallest batch to look at.")] = 1,
    high: Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="Largest batch to look at.")] = 64,
    most_probes: Annotated[int, typer.Option(min=1, help="Most batches that are really tried.")] = 4,
    settings: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Search the batch size: each probe trains a few real steps, within what the planner says fits."""
    with Output.opened(as_json) as output:
        from ...jobs.spec import load_spec

        job = load_spec(spec, settings or ())
        with output.progress() as bars:
            search = _search(job, device, objective, low, high, most_probes, bars)
        data: dict[str, Any] = {
            "batch": search.best.batch,
            "objective": objective,
            "trials": [trial.to_dict() for trial in search.trials],
        }
        output.result(data, lambda console: _draw(console, search))


def _search(
    spec: JobSpec,
    device: str,
    objective: Literal["throughput", "max_batch"],
    low: int,
    high: int,
    most_probes: int,
    bars: Bars,
) -> Search:
    import uuid

    from ..models import uncollected

    with uncollected():
        from ..cluster import RayCluster
        from ..trial import Order, run_probe
        from ..tuning import SearchOrder, search_batch
        from .job import Job

    settings = Settings.read()
    bars.stage("reading the data and measuring this machine")
    job = Job.open(spec, device, settings)
    high = min(high, len(job.data.train))
    rows = job.data.train
    longest = rows.take(sorted(range(len(rows)), key=lambda i: -len(rows.input_ids[i]))[:high])
    bars.stage("starting Ray")
    with RayCluster(settings, kind=job.profile.kind) as cluster:
        bars.stage("searching")
        return search_batch(
            SearchOrder(
                job_id=f"{spec.name}-{uuid.uuid4().hex[:8]}",
                plan_batch=job.planner(),
                run=partial(run_probe, Order(spec=job.spec, device=job.device, rows=longest, seconds=settings.probe_s)),
                low=min(low, high),
                high=high,
                objective=objective,
                most_probes=most_probes,
                cpus=cluster.cpus,
                kind=job.profile.kind,
                directory=Path(spec.output.dir).absolute() / "tune",
                stop_timeout_s=settings.stop_timeout_s,
            ),
            lambda trial: bars.advance(0, f"batch {trial.batch}: {'fits' if trial.report.fits else 'does not fit'}"),
        )


def _draw(console: Console, search: Search) -> None:
    table = Table(title=f"best batch: {search.best.batch}")
    for name in ("batch", "fits", "tokens/s", "step", "predicted", "peak device memory", "reason"):
        table.add_column(name)
    for trial in sorted(search.trials, key=lambda trial: trial.batch):
        report, predicted = trial.report, trial.plan.predicted
        if not report.fits:
            table.add_row(str(trial.batch), "no", "", "", "", "", report.reason)
            continue
        table.add_row(
            str(trial.batch),
            "yes",
            f"{report.tokens_per_s:,.0f}",
            seconds(report.step_s),
            seconds(predicted.step_s) if predicted else "",
            format_bytes(report.peak_device_bytes),
            "",
        )
    console.print(table)
