"""What plans and predictions look like to a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.table import Table

from ...jobs.units import format_bytes, format_needed

if TYPE_CHECKING:
    from ...jobs.model_facts import ModelFacts
    from ...jobs.policy import Policy, Predicted
    from ...jobs.timeline import Timeline
    from ...schedulers.planner import Plan
    from ...schedulers.planner.answer import Reason

_HOME_WORDS = {"gpu": "on the GPU", "host": "on the host", "nvme": "on NVMe", "recompute": "recomputed"}


def homes_line(policy: Policy) -> str:
    """How many boundaries have each home, as words."""
    homes = policy.count_homes()
    return "boundaries: " + ", ".join(f"{homes[home]} {words}" for home, words in _HOME_WORDS.items())


def solver_line(answer: Plan) -> str:
    """Who decided, and how good it is proven to be."""
    solver = answer.solver
    if solver is None:
        return ""
    gap = f", gap {solver.gap:.2%}" if solver.gap is not None else ""
    backend = f" ({solver.backend})" if solver.backend else ""
    return f"planner: {solver.planner}{backend}, {solver.status.lower()}{gap}, {solver.seconds:.2f} s"


def prediction_table(columns: Mapping[str, Predicted]) -> Table:
    """Plans side by side."""
    table = Table(title="predicted")
    table.add_column("")
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    for label, show in _PREDICTION_ROWS.items():
        table.add_row(label, *(show(predicted) for predicted in columns.values()))
    return table


_PREDICTION_ROWS = {
    "step": lambda p: seconds(p.step_s),
    "tokens/s": lambda p: f"{p.tokens_per_s:,.0f}",
    "TFLOPS (6N)": lambda p: f"{p.tflops_6n:.3g}",
    "forwards of compute": lambda p: f"{p.compute_units:.2f}",
    "peak GPU": lambda p: format_bytes(p.peak_gpu_bytes),
    "peak host": lambda p: format_bytes(p.peak_host_bytes),
    "NVMe": lambda p: format_bytes(p.nvme_bytes),
    "waits for links": lambda p: seconds(sum(p.exposed_s.values())),
}


def memory_table(policy: Policy, facts: ModelFacts, predicted: Predicted) -> Table:
    """Bytes by tier and purpose."""
    from ...schedulers.costs import host_bytes

    table = Table(title="memory")
    table.add_column("tier")
    table.add_column("purpose")
    table.add_column("bytes", justify="right")
    table.add_row("GPU", "peak, everything", format_bytes(predicted.peak_gpu_bytes))
    for purpose, size in host_bytes(facts, policy).items():
        table.add_row("host", purpose.replace("_", " "), format_bytes(size))
    table.add_row("host", "sum", format_bytes(predicted.peak_host_bytes))
    table.add_row("NVMe", "boundaries", format_bytes(predicted.nvme_bytes))
    return table


def reasons_table(reasons: Iterable[Reason]) -> Table:
    """Why nothing fits."""
    table = Table()
    for name in ("resource", "needed", "available", "short by", "what helps"):
        table.add_column(name)
    for reason in reasons:
        sizes = format_needed(reason.needed_bytes), format_bytes(reason.available_bytes)
        table.add_row(reason.resource.replace("_", " "), *sizes, format_needed(reason.shortfall_bytes), reason.hint)
    return table


def timeline_table(timeline: Timeline) -> Table:
    """Busy and exposed time and bytes of every stream."""
    table = Table(title=f"one step: {seconds(timeline.step_s)}")
    table.add_column("stream")
    for name in ("busy", "compute waits", "moved"):
        table.add_column(name, justify="right")
    moved = timeline.bytes_by_stream()
    for stream, busy in timeline.busy_s().items():
        waits = timeline.exposed_s.get(stream, 0.0)
        table.add_row(stream, seconds(busy), seconds(waits), format_bytes(moved.get(stream, 0)))
    return table


def seconds(value: float) -> str:
    """``0.0123`` becomes ``12.3 ms``."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.4g} s"
