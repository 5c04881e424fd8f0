"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Spec = Annotated[Path, typer.Argument(help="Job file (YAML).")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override the job file, for example train.batch=8.")]
Gpu = Annotated[str | None, typer.Option(help="A known GPU such as H800 or RTX3090, or a profile file.")]
GpuMemory = Annotated[str | None, typer.Option(help="GPU memory the plan may use, for example 70GB.")]
HostMemory = Annotated[str | None, typer.Option(help="Host memory the plan may use, for example 96GiB.")]
Nvme = Annotated[str | None, typer.Option(help="NVMe space the plan may use, for example 500GB.")]
H2d = Annotated[float | None, typer.Option(help="Host-to-GPU rate, in GB (1e9 bytes) per second.")]
D2h = Annotated[float | None, typer.Option(help="GPU-to-host rate, in GB per second.")]
NvmeRead = Annotated[float | None, typer.Option(help="NVMe read rate, in GB per second.")]
NvmeWrite = Annotated[float | None, typer.Option(help="NVMe write rate, in GB per second.")]
HostRate = Annotated[float | None, typer.Option(help="Host memory bandwidth, in GB per second.")]
Efficiency = Annotated[float | None, typer.Option(help="Share of the GPU's matrix rate that layers reach.")]
Html = Annotated[
    Path | None, typer.Option("--html", help="Draw the policy and its predicted step into this HTML file.")
]
