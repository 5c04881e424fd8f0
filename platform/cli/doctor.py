"""``lazytrain doctor``: does everything here work, by trying it, and what to do where it does not."""

from __future__ import annotations

import importlib.metadata
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ...jobs.units import format_bytes
from ..settings import Settings
from . import doctor_cluster, doctor_machine, options
from .doctor_machine import Finding
from .output import Output

EPILOG = "Example:  lazytrain doctor --nvme-dir /scratch --ray-address 10.0.0.1:6379"

_MARKS = {"ok": "[green]ok[/green]", "warning": "[yellow]note[/yellow]", "failed": "[red]failed[/red]"}
_RAY_PORT = 52365
"""The one port that a local Ray does not choose for itself: its agent's."""
_MLFLOW_PORT = 5000


Check = Callable[[], Finding]


def command(
    nvme_dir: Annotated[Path | None, typer.Option(help="Directory of the NVMe tier to check.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="HOST:PORT of a Ray cluster whose nodes to check.")] = None,
    as_json: options.Json = False,
) -> None:
    """Check this installation by a tiny real call of each part, and say what to fix."""
    with Output.opened(as_json) as output:
        settings = Settings.read()
        checks = all_checks(settings, nvme_dir or settings.nvme_dir)
        findings = []
        with output.progress() as bars:
            bars.stage("checking", total=len(checks))
            for done, (name, check) in enumerate(checks.items()):
                bars.advance(done, name)
                findings.append(run_check(name, check))
            if ray_address is not None:
                bars.stage("asking the nodes")
                findings += doctor_cluster.check_cluster(settings, ray_address)
        healthy = all(finding.verdict != "failed" for finding in findings)
        data = {"healthy": healthy, "checks": [asdict(finding) for finding in findings]}
        output.result(data, lambda console: _draw(console, findings))
        if not healthy:
            raise typer.Exit(1)


def all_checks(settings: Settings, nvme_dir: Path | None) -> dict[str, Check]:
    """The checks by name, in the order in which a person would fix things."""
    return {
        "Python": _python,
        "torch": _torch,
        "driver": doctor_machine.check_driver,
        "visible GPUs": doctor_machine.check_visible,
        "CUDA": _cuda,
        "pinned memory": _pinned,
        "transformers": _transformers,
        "planner": _planner,
        "optimizer": _optimizer,
        "bitsandbytes": _bitsandbytes,
        "Ray": _ray,
        "MLflow": _mlflow,
        "ports": lambda: _ports(settings),
        "open files": doctor_machine.check_open_files,
        "shared memory": lambda: doctor_machine.check_shared_memory(settings),
        "host memory": _memory,
        "clock": doctor_machine.check_clock,
        "NVMe": lambda: _nvme(nvme_dir),
    }


def run_check(name: str, check: Check) -> Finding:
    """The check's finding; whatever it raises is one, because a broken library may raise anything."""
    try:
        return check()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        package = name.lower() if name != "planner" else "ortools"
        return Finding(
            name, "failed", f"{type(error).__name__}: {lines[0]}", f"pip install --force-reinstall {package}"
        )


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    fine = (3, 10) <= sys.version_info[:2] <= (3, 13)
    return Finding("Python", "ok" if fine else "failed", version, "" if fine else "use Python 3.10 to 3.13")


def _torch() -> Finding:
    import torch

    product = torch.ones(2, 3) @ torch.ones(3, 2)
    assert product[0, 0].item() == 3.0, "a matrix product came out wrong"
    return Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _cuda() -> Finding:
    import torch

    if not torch.cuda.is_available():
        fix = "install the NVIDIA driver and a CUDA build of torch; without a GPU, jobs run on emulated devices"
        return Finding("CUDA", "warning", "no device", fix)
    free, total = torch.cuda.mem_get_info()
    torch.ones(8, device="cuda").sum().item()
    return Finding("CUDA", "ok", f"{torch.cuda.get_device_name()}, {format_bytes(free)} of {format_bytes(total)} free")


def _pinned() -> Finding:
    import resource

    import torch

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    if not torch.cuda.is_available():
        return Finding("pinned memory", "ok", f"no GPU needs it (ulimit -l: {said})")
    from ...jobs.executor.devices import CudaDevice

    device = CudaDevice(torch.cuda.current_device())
    wanted, pinned = 2**30, device.host_empty(2**30, torch.uint8).is_pinned()
    device.close()
    if not pinned:
        fix = "ulimit -l unlimited (docker run --ulimit memlock=-1); until then, copies to the GPU take a detour"
        return Finding("pinned memory", "warning", f"{format_bytes(wanted)} refused (ulimit -l: {said})", fix)
    return Finding("pinned memory", "ok", f"{format_bytes(wanted)} pinned (ulimit -l: {said})")


def _transformers() -> Finding:
    from transformers import AutoConfig

    AutoConfig.for_model("qwen3")
    return Finding("transformers", "ok", importlib.metadata.version("transformers"))


def _planner() -> Finding:
    from ortools.math_opt.python import mathopt

    model = mathopt.Model(name="doctor")
    x = model.add_integer_variable(lb=0, ub=3)
    model.maximize(x)
    result = mathopt.solve(model, mathopt.SolverType.HIGHS)
    assert round(result.objective_value()) == 3, "HiGHS gave a wrong optimum"
    return Finding("planner", "ok", f"ortools {importlib.metadata.version('ortools')}, HiGHS")


def _optimizer() -> Finding:
    import torch

    from ...jobs.optim import HybridAdamW, native

    parameter = torch.nn.Parameter(torch.ones(64, 128))  # a matrix: vectors keep float32 states
    parameter.grad = torch.ones_like(parameter)
    HybridAdamW([parameter], lr=0.1).step()
    assert bool((parameter < 1).all()), "the step did not lower the weights"
    if not native.available():
        return Finding("optimizer", "warning", "8-bit AdamW stepped, by torch: over 100 times slower", native.reason())
    return Finding("optimizer", "ok", f"8-bit AdamW stepped: {native.describe()}")


def _bitsandbytes() -> Finding:
    import torch
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

    values = torch.linspace(-1, 1, 4096)
    code, state = quantize_blockwise(values)
    worst = (dequantize_blockwise(code, state) - values).abs().max().item()
    assert worst < 0.05, f"quantised values are off by {worst:.3f}"
    return Finding("bitsandbytes", "ok", importlib.metadata.version("bitsandbytes"))


def _ray() -> Finding:
    import ray
    from ray.train.v2._internal.constants import is_v2_enabled

    fine = ray.__version__.startswith("2.60.") and is_v2_enabled()
    fix = "" if fine else "pip install 'ray[default,train,tune]>=2.60,<2.61', and unset RAY_TRAIN_V2_ENABLED"
    return Finding("Ray", "ok" if fine else "failed", ray.__version__, fix)


def _mlflow() -> Finding:
    import mlflow

    from ...jobs.tracking import create_database

    with tempfile.TemporaryDirectory() as directory:
        create_database(f"sqlite:///{directory}/mlflow.db", "doctor")
    return Finding("MLflow", "ok", f"{mlflow.__version__}, a SQLite database was made")


def _ports(settings: Settings) -> Finding:
    wanted = {_RAY_PORT: "Ray", _MLFLOW_PORT: "MLflow's pages", settings.api_port: "API"}
    taken = [port for port in wanted if port and not _is_free(port)]
    if taken:
        fix = f"fine if lazytrain is up; else see who holds them with  ss -ltnp 'sport = :{taken[0]}'"
        return Finding("ports", "warning", f"in use: {', '.join(f'{port} ({wanted[port]})' for port in taken)}", fix)
    return Finding("ports", "ok", f"free: {', '.join(f'{port} ({use})' for port, use in wanted.items())}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _memory() -> Finding:
    from ..probe.memory import host_memory

    memory = host_memory()
    found = f"{format_bytes(memory.free_bytes)} of {format_bytes(memory.limit_bytes)} free ({memory.source})"
    if memory.free_bytes < 4 * 2**30:
        return Finding("host memory", "warning", found, "close other programs, or raise the container's memory limit")
    return Finding("host memory", "ok", found)


def _nvme(directory: Path | None) -> Finding:
    from ...jobs.executor.stores.gpudirect import problem_here
    from ...jobs.executor.stores.nvme import direct_io_problem
    from ..probe.disk import probe_disk

    if directory is None:
        fix = "name one with --nvme-dir or LAZYTRAIN_NVME_DIR; without it no boundary can go to disk"
        return Finding("NVMe", "warning", "no directory given", fix)
    tier = probe_disk(directory)
    if not tier.available:
        fix = "name a writable directory on a local disk, not on a RAM-backed file system"
        return Finding("NVMe", "failed", f"{directory}: {tier.reason}", fix)
    rates = f"read {tier.read_bytes_s / 1e9:.2g}, write {tier.write_bytes_s / 1e9:.2g} GB/s"
    found = f"{directory}: {rates}, {format_bytes(tier.free_bytes)} free"
    if problem := direct_io_problem(directory):
        fix = "name a directory on ext4 or XFS: through the page cache, transfers take host memory and time"
        return Finding("NVMe", "warning", f"{found}; buffered I/O, because {problem}", fix)
    if problem := problem_here(directory):
        return Finding("NVMe", "ok", f"{found}, direct I/O by way of the host (no GPUDirect Storage: {problem})")
    return Finding("NVMe", "ok", f"{found}, direct I/O, from the GPU too (GPUDirect Storage)")


def _draw(console: Console, findings: list[Finding]) -> None:
    table = Table(show_header=False, box=None)
    for finding in findings:
        table.add_row(finding.name, _MARKS[finding.verdict], finding.found)
        if finding.fix:
            table.add_row("", "", f"[dim]fix: {finding.fix}[/dim]")
    console.print(table)
