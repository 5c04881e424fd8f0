"""``lazytrain profile``: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ...jobs.units import format_bytes
from ..settings import Settings
from . import options
from .output import Output
from .picture import check_places, write_text

if TYPE_CHECKING:
    from ..probe import Measured

EPILOG = "Example:  lazytrain profile --nvme-dir /scratch --out node.json"


def command(
    emulate: Annotated[str | None, typer.Option(help="Emulate this GPU's memory and links on the CPU.")] = None,
    nvme_dir: Annotated[Path | None, typer.Option(help="Directory of the NVMe tier.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the profile here, for --gpu.")] = None,
    as_json: options.Json = False,
) -> None:
    """Measure what the planner needs to know: compute, memory, links, disk and optimizer rates."""
    with Output.opened(as_json) as output:
        from ...schedulers.hardware import hardware
        from ..probe import measure

        check_places(out)
        settings = Settings.read()
        base = hardware(emulate).model_copy(update={"device": "emulated"}) if emulate else None
        with output.progress() as bars:
            bars.stage("measuring this machine")
            measured = measure(
                base,
                nvme_dir=nvme_dir or settings.nvme_dir,
                host_reserve_bytes=int(settings.host_reserve),
            )
        if out is not None:
            write_text(out, measured.profile.model_dump_json(indent=1) + "\n")
        output.result(_data(measured), lambda console: _draw(console, measured))


def _data(measured: Measured) -> dict[str, Any]:
    disk = measured.disk
    return {
        "profile": measured.profile.model_dump(mode="json"),
        "nvme": {
            "path": str(disk.path) if disk else None,
            "available": bool(disk and disk.available),
            "reason": disk.reason if disk else "unavailable (no directory given)",
        },
        "host_memory": {
            "limit_bytes": measured.memory.limit_bytes,
            "used_bytes": measured.memory.used_bytes,
            "source": measured.memory.source,
        },
    }


def _draw(console: Console, measured: Measured) -> None:
    profile, disk = measured.profile, measured.disk
    table = Table(title=f"{profile.name} ({profile.device})")
    table.add_column("what")
    table.add_column("measured", justify="right")
    for dtype, rate in profile.matmul_flops.items():
        table.add_row(f"matrix products, {dtype}", f"{rate / 1e12:.3g} TFLOPS")
    for dtype, rate in profile.attention_flops.items():
        table.add_row(f"attention, {dtype}", f"{rate / 1e12:.3g} TFLOPS")
    table.add_row("GPU memory", format_bytes(profile.gpu_memory_bytes))
    table.add_row("host to GPU, GPU to host", f"{profile.h2d_bytes_s / 1e9:.3g}, {profile.d2h_bytes_s / 1e9:.3g} GB/s")
    limit = f"{format_bytes(measured.memory.limit_bytes)} ({measured.memory.source})"
    table.add_row("host memory for jobs, limit", f"{format_bytes(profile.host_memory_bytes)}, {limit}")
    table.add_row("host memory rate", f"{profile.host_bytes_s / 1e9:.3g} GB/s")
    table.add_row("optimizer on the CPU", f"{profile.update_parameters_s / 1e6:.3g} M parameters/s")
    if disk is not None and disk.available:
        rates = f"{disk.read_bytes_s / 1e9:.3g}, {disk.write_bytes_s / 1e9:.3g} GB/s"
        table.add_row(f"NVMe {disk.path}: read, write", rates)
    else:
        table.add_row("NVMe", disk.reason if disk else "no directory given (--nvme-dir)")
    console.print(table)
