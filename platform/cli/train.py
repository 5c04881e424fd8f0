"""``lazytrain train``: one job in this process, without a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ...jobs.units import format_bytes
from ..settings import Settings
from . import options
from .output import Bars, Output
from .signals import stop_on_signal
from .tables import homes_line, seconds

if TYPE_CHECKING:
    from ...jobs.policy import Policy
    from ...jobs.spec import JobSpec
    from ...jobs.train import Result
    from ..schemas import Calibration
    from .job import Job
    from .replanning import Replanning

EPILOG = "Example:  lazytrain train job.yaml --device emulated:RTX3090 --set train.max_steps=20"


def command(
    spec: options.Spec,
    policy: Annotated[Path | None, typer.Option(help="Train with this policy instead of planning.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or emulated:GPU.")] = "auto",
    settings: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Plan and train one job here, or go on with it from its last checkpoint.

    Ctrl-C asks the run to save a checkpoint and end; a second Ctrl-C ends it at once.
    """
    with Output.opened(as_json) as output:
        from ...jobs.policy import Policy
        from ...jobs.run_directory import RunDirectory
        from ...jobs.spec import load_spec
        from ..artifacts import read_record
        from ..schemas import Calibration

        job = load_spec(spec, settings or ())
        given = Policy.load(policy) if policy is not None else None
        with output.progress() as bars, stop_on_signal() as request:
            result = _train(job, given, device, bars, request.requested)
        calibration = read_record(Calibration, RunDirectory(Path(result.run_dir)).calibration)
        told = {"calibration": calibration.model_dump(mode="json") if calibration is not None else None}
        output.result({**result.model_dump(mode="json"), **told}, lambda console: _draw(console, result, calibration))
        if request.requested():
            raise typer.Exit(128 + request.number)


def _train(spec: JobSpec, given: Policy | None, device: str, bars: Bars, stop: Callable[[], bool]) -> Result:
    from ..models import uncollected
    from ..planning import feasible_policy

    with uncollected():
        from ...jobs.train import shown, train
        from .job import Job

    bars.stage("reading the data and measuring this machine")
    settings = Settings.read()
    job = Job.open(spec, device, settings)
    decided = given or _earlier_policy(spec)
    if decided is None:
        bars.stage("planning")
        decided = feasible_policy(job.plan())
    bars.say(homes_line(decided))
    bars.stage("training")
    replanning = None if given is not None else _replanning(job, settings, bars.say)

    def on_progress(record: Mapping[str, float]) -> None:
        bars.set_total(record["total_steps"])
        if "loss" in record:
            bars.advance(record["step"], shown(record))
        if "exact_match" in record:
            bars.say(f"held-out exact match at step {record['step']:.0f}: {record['exact_match']:.1%}")
        if replanning is not None:
            replanning.hear(record)

    try:
        return train(job.spec, policy=decided, device=job.device, stop=stop, progress=on_progress)
    finally:
        if replanning is not None:
            replanning.close()


def _replanning(job: Job, settings: Settings, say: Callable[[str], None]) -> Replanning:
    """For a run whose policy was planned: the new one takes no more memory than it."""
    from ...jobs.executor import Emulated
    from ...jobs.run_directory import RunDirectory
    from ..admission import PlannerProcess
    from .replanning import Replanning

    gpu_bytes = job.device.memory_bytes if isinstance(job.device, Emulated) else job.limits.gpu_memory
    known = {
        "spec": job.spec.model_dump(mode="json"),
        "profile": job.profile.model_dump(mode="json"),
        "gpu_bytes": gpu_bytes,
    }
    log_file = settings.log_dir / "train-planner.log"
    return Replanning(
        RunDirectory(Path(job.spec.output.dir)), known, lambda: PlannerProcess(log_file, niceness=10), say
    )


def _earlier_policy(spec: JobSpec) -> Policy | None:
    """The policy of the run that goes on: its batch and its step numbers must stay what they were."""
    from ...jobs.policy import Policy

    path = Path(spec.output.dir) / "policy.json"
    resumes = any((Path(spec.output.dir) / "checkpoints").glob("*"))
    return Policy.load(path) if resumes and path.exists() else None


def _draw(console: Console, result: Result, calibration: Calibration | None) -> None:
    from ...jobs.policy import Policy

    policy = Policy.load(Path(result.run_dir) / "policy.json")  # the last one, if there were several
    table = Table(title=f"{result.status} after {result.steps} steps", show_header=False)
    table.add_row("policy", homes_line(policy))
    if result.loss is not None:
        table.add_row("loss", f"{result.loss:.4f}")
    if result.exact_match is not None:
        before = f"{result.exact_match_before:.1%} -> " if result.exact_match_before is not None else ""
        table.add_row("held-out exact match", f"{before}{result.exact_match:.1%}")
    if result.best_step is not None:
        table.add_row("best evaluation loss", f"{result.best_eval_loss:.4f} at step {result.best_step}")
    predicted = f", predicted {seconds(result.predicted_step_s)}" if result.predicted_step_s else ""
    table.add_row("step", f"{seconds(result.step_s)}{predicted}")
    table.add_row("tokens/s", f"{result.tokens_per_s:,.0f}")
    table.add_row("peak device memory", format_bytes(result.peak_gpu_bytes))
    table.add_row("host memory", format_bytes(result.host_bytes))
    console.print(table)
    if calibration is not None:
        console.print(calibration.sentence)
    for note in result.notes:
        console.print(note)
    console.print(f"everything is in {result.run_dir}", soft_wrap=True)
    if result.status == "stopped":
        console.print("run the same command again to go on")
