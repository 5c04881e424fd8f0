"""The demo's last screen."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ...jobs.units import format_bytes
from .tables import homes_line, seconds

if TYPE_CHECKING:
    from ..demo.run import Outcome


def draw(console: Console, outcome: Outcome) -> None:
    """What was decided, what came of it, and where to look next."""
    result, policy = outcome.result, outcome.policy
    table = Table(title=f"done in {outcome.seconds:.0f} s", show_header=False)
    table.add_row("decided", homes_line(policy))
    table.add_row(
        "batch", f"{policy.micro_batch} rows, the largest of {len(outcome.search.trials)} looked at that fits"
    )
    table.add_row(
        "device memory",
        f"budget {format_bytes(outcome.device_budget_bytes)}, used {format_bytes(result.peak_gpu_bytes)}",
    )
    table.add_row("plain training", f"would need {format_bytes(outcome.plain_training_bytes)} on the device")
    table.add_row("step", f"predicted {seconds(outcome.predicted_step_s)}, measured {seconds(result.step_s)}")
    table.add_row("calibration", f"by the probes: layers reach {outcome.profile.efficiency:.0%} of the matrix rate")
    table.add_row("held-out exact match", f"{_share(result.exact_match_before)} -> {_share(result.exact_match)}")
    console.print(table)
    console.print("look next:")
    console.print(f"  mlflow ui --backend-store-uri {shlex.quote(outcome.mlflow_uri)}", soft_wrap=True, highlight=False)
    console.print(f"  {result.run_dir}/policy.json, verdicts.jsonl, model/", soft_wrap=True, highlight=False)
    console.print("  lazytrain plan --model qwen3.6-27b --gpu H800 --batch 72 --length 1024", soft_wrap=True)


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"
