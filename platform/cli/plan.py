"""``lazytrain plan``: policy and prediction for a job or for a model and a GPU; fits or not, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from ...jobs.errors import InputError
from ...jobs.units import MOST_ROWS, MOST_TOKENS
from . import options
from .output import Output
from .picture import check_places, write_page, write_text
from .tables import homes_line, memory_table, prediction_table, reasons_table, solver_line

if TYPE_CHECKING:
    from ...jobs.model_facts import ModelFacts
    from ...jobs.spec import JobSpec
    from ...schedulers.hardware import HardwareProfile
    from ...schedulers.planner import Plan

EPILOG = "Example:  lazytrain plan --model qwen3.6-27b --gpu H800 --batch 72 --length 1024"


def command(
    spec: Annotated[Path | None, typer.Argument(help="Job file; or use --model, --batch and --length.")] = None,
    model: Annotated[str | None, typer.Option(help="HF directory or id, config JSON, or a known shape.")] = None,
    gpu: options.Gpu = None,
    batch: Annotated[int | None, typer.Option(min=1, max=MOST_ROWS, help="Rows of one micro-batch.")] = None,
    length: Annotated[int | None, typer.Option(min=2, max=MOST_TOKENS, help="Tokens of one row.")] = None,
    dtype: Annotated[Literal["bfloat16", "float32"] | None, typer.Option(help="Compute dtype.")] = None,
    planner: Annotated[str | None, typer.Option(help="full, paper, megatrain, every_layer or keep_all.")] = None,
    solve_seconds: Annotated[float | None, typer.Option(min=0.1, help="Longest time in the solver.")] = None,
    gpu_memory: options.GpuMemory = None,
    host_memory: options.HostMemory = None,
    nvme: options.Nvme = None,
    h2d_gbps: options.H2d = None,
    d2h_gbps: options.D2h = None,
    nvme_read_gbps: options.NvmeRead = None,
    nvme_write_gbps: options.NvmeWrite = None,
    host_gbps: options.HostRate = None,
    efficiency: options.Efficiency = None,
    out: Annotated[Path | None, typer.Option(help="Write the policy here.")] = None,
    html: options.Html = None,
    settings: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Decide the policy and predict time and memory, without running anything."""
    with Output.opened(as_json) as output:
        from ...jobs.model_facts import ModelFacts
        from ...schedulers.hardware import hardware
        from ..admission.measuring import measuring_of
        from ..beside import beside
        from ..planning import Limits, import_solver, make_plan
        from ..settings import Settings
        from ..sparing import spare_imports

        check_places(out, html)
        job = _job(spec, settings or ())
        profile = hardware(
            _gpu_name(gpu, job),
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            nvme=nvme,
            h2d_gbps=h2d_gbps,
            d2h_gbps=d2h_gbps,
            nvme_read_gbps=nvme_read_gbps,
            nvme_write_gbps=nvme_write_gbps,
            host_gbps=host_gbps,
            efficiency=efficiency,
        )
        limits = (Limits.of(job) if job else Limits()).override(
            planner=planner,
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            nvme=nvme,
            solve_seconds=solve_seconds,
        )
        shape = _Shape.of(job, model, batch, length, dtype)
        measuring = measuring_of(Settings.read())
        asked = shape.model if job is None else _with_model(job, shape.model)

        def facts_at(batch: int) -> ModelFacts:
            return measuring.facts(asked, batch=batch, length=shape.length, dtype=shape.dtype)

        def lighten() -> None:
            if job is None or not job.model.trust_remote_code:
                spare_imports()

        text = beside(lambda: facts_at(shape.batch).model_dump_json(), import_solver, first=lighten)
        facts = ModelFacts.model_validate_json(text)
        answer = make_plan(facts, profile, limits, facts_at=facts_at)
        if answer.policy is not None and out is not None:
            write_text(out, answer.policy.to_json())
        if answer.policy is not None and html is not None:
            write_page(html, answer.policy, facts, profile)
        output.result(answer.to_dict(), lambda console: draw(console, answer, facts, profile))
        if not answer.feasible:
            raise typer.Exit(3)


def _job(spec: Path | None, settings: Sequence[str]) -> JobSpec | None:
    if spec is None:
        if settings:
            raise InputError("--set changes a job file, and none is named", hint="lazytrain plan SPEC --set KEY=VALUE")
        return None
    from ...jobs.spec import load_spec

    return load_spec(spec, settings)


@dataclass(frozen=True)
class _Shape:
    """What is planned for: the command line's word goes before the job file's."""

    model: str
    batch: int
    length: int
    dtype: Literal["bfloat16", "float32"]

    @classmethod
    def of(
        cls,
        job: JobSpec | None,
        model: str | None,
        batch: int | None,
        length: int | None,
        dtype: Literal["bfloat16", "float32"] | None,
    ) -> _Shape:
        if job is not None:
            model = model or job.model.path
            batch = batch or (job.train.batch if job.train.batch != "auto" else None)
            length = length or job.data.max_length
            dtype = dtype or job.model.dtype
        missing = [name for name, value in (("--model", model), ("--batch", batch), ("--length", length)) if not value]
        if model is None or batch is None or length is None:
            raise InputError(
                f"nothing says what to plan for: {', '.join(missing)} missing",
                hint="lazytrain plan SPEC reads them from the job file; with train.batch: auto give --batch,"
                " or let lazytrain tune search it",
            )
        return cls(model, batch, length, dtype or "bfloat16")


def _with_model(job: JobSpec, path: str) -> JobSpec:
    return job.model_copy(update={"model": job.model.model_copy(update={"path": path})})


def _gpu_name(gpu: str | None, job: JobSpec | None) -> str:
    if gpu is not None:
        return gpu
    if job is not None and job.resources.gpu:
        return job.resources.gpu[0]
    raise InputError(
        "nothing says for which GPU to plan",
        hint="give --gpu H800, or --gpu profile.json with a profile that lazytrain profile --out profile.json wrote",
    )


def draw(console: Console, answer: Plan, facts: ModelFacts, profile: HardwareProfile) -> None:
    """The plan for a person."""
    console.print(
        f"[bold]{facts.architecture}[/bold], {facts.parameters / 1e9:.3g} B parameters, "
        f"{facts.micro_batch} x {facts.sequence_length} tokens, on {profile.name}"
    )
    if answer.policy is None or answer.predicted is None:
        console.print("[red]does not fit[/red]")
        console.print(reasons_table(answer.reasons))
        for change in answer.changes:
            console.print(f"fits with {change.words}: {change.tokens_per_s:,.0f} tokens/s")
        return
    console.print(homes_line(answer.policy))
    console.print(solver_line(answer))
    console.print(prediction_table({"this plan": answer.predicted, **answer.baselines}))
    console.print(memory_table(answer.policy, facts, answer.predicted))
    for note in answer.notes:
        console.print(f"[yellow]{note}[/yellow]")
