"""``lazytrain evaluate``: exact match of a model on a job's evaluation rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from . import options
from .output import Output

EPILOG = "Example:  lazytrain evaluate job.yaml --set evaluate.limit=200"


def command(
    job: Annotated[Path, typer.Argument(help="Job file, or the directory of a run.")],
    model: Annotated[str | None, typer.Option(help="Model folder, hub id or run; else what the job made.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or emulated:GPU.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="File for every row's prompt, output and verdict.")] = None,
    settings: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Generate answers for the evaluation rows and count the right ones, with a 95 % interval."""
    with Output.opened(as_json) as output:
        from ...jobs.spec import load_spec
        from ...jobs.train import evaluate_model, trained_model
        from .job import open_device_of

        spec = load_spec(job / "job.yaml" if job.is_dir() else job, settings or ())
        made = trained_model(spec.output.dir)
        chosen = trained_model(model) if model else made if made != spec.output.dir else spec.model.path
        verdicts = out or Path(spec.output.dir) / "evaluation.jsonl"
        result = evaluate_model(spec, model=chosen, device=open_device_of(device), verdicts=verdicts)
        facts = result.model_dump(mode="json")
        output.result(facts, lambda console: _draw(console, facts))


def _draw(console: Console, facts: Mapping[str, Any]) -> None:
    low, high = facts["interval"]
    console.print(
        f"exact match {facts['exact_match']:.1%} ({facts['correct']} of {facts['total']}; 95 % interval {low:.1%} to "
        f"{high:.1%})\nmodel {facts['model']}\nevery row in {facts['verdicts']}",
        soft_wrap=True,
    )
