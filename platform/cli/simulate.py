"""``lazytrain simulate``: the timeline of a policy on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from ...jobs.units import format_bytes
from . import options
from .output import Output
from .picture import check_places, write_page, writing
from .tables import homes_line, timeline_table

EPILOG = "Example:  lazytrain simulate policy.json --gpu RTX3090 --model qwen2.5-7b --trace step.json"


def command(
    policy: Annotated[Path, typer.Argument(help="Policy file, as lazytrain plan --out writes it.")],
    gpu: Annotated[str, typer.Option(help="A known GPU such as H800 or RTX3090, or a profile file.")],
    model: Annotated[str, typer.Option(help="The model the policy was made for: HF directory or id, config, shape.")],
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Compute dtype.")] = "bfloat16",
    trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace here.")] = None,
    html: options.Html = None,
    as_json: options.Json = False,
) -> None:
    """Run a policy on paper: when each operation runs, who waits for whom, how full each memory gets."""
    with Output.opened(as_json) as output:
        from ...jobs.policy import Policy
        from ...schedulers.hardware import hardware
        from ...schedulers.simulator import predict
        from ...schedulers.simulator import simulate as run
        from ..admission.measuring import measuring_of
        from ..settings import Settings

        check_places(trace, html)
        decided = Policy.load(policy)
        measuring, shape = measuring_of(Settings.read()), (decided.micro_batch, decided.sequence_length)
        facts = measuring.facts(model, batch=shape[0], length=shape[1], dtype=dtype)
        decided.check(facts)
        profile = hardware(gpu)
        timeline = run(decided, facts, profile)
        if trace is not None:
            with writing(trace):
                timeline.save_trace(trace)
        if html is not None:
            write_page(html, decided, facts, profile)
        data: dict[str, Any] = {
            "step_s": timeline.step_s,
            "predicted": predict(decided, facts, profile).model_dump(mode="json"),
            "busy_s": timeline.busy_s(),
            "exposed_s": timeline.exposed_s,
            "peak_bytes": timeline.peak_bytes,
            "bytes": timeline.bytes_by_stream(),
            "trace": str(trace) if trace is not None else None,
        }

        def draw(console: Console) -> None:
            console.print(homes_line(decided))
            console.print(timeline_table(timeline))
            peaks = ", ".join(f"{tier} {format_bytes(size)}" for tier, size in timeline.peak_bytes.items())
            console.print(f"peaks: {peaks}")

        output.result(data, draw)
