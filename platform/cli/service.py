"""``lazytrain up``, ``down`` and ``serve``: the shared service's processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ...jobs.errors import HardwareError, LazytrainError, Unreachable
from ..settings import PREFIX, Settings
from . import options
from .output import Bars, Output

if TYPE_CHECKING:
    from ..schemas import Health

UP_EPILOG = "Example:  lazytrain up --emulate RTX3090 --gpus 2"
DOWN_EPILOG = "Example:  lazytrain down"
SERVE_EPILOG = "Example:  lazytrain serve --ray-address 10.0.0.1:6379 --host 0.0.0.0 --behind-proxy gpu.example.org"

_PACKAGE = "lazytrain.platform"
_API = [sys.executable, "-m", "lazytrain.dashboards.service"]
"""API and pages in one process; it is named, not imported: pages are above the platform."""

Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the API, by default 8470.")]
Root = Annotated[list[Path] | None, typer.Option("--root", help="Folder that jobs may use; again for several.")]
Database = Annotated[str | None, typer.Option(help="sqlite:///PATH or postgresql://HOST/NAME.")]


def up(
    emulate: Annotated[str | None, typer.Option(help="Emulate GPUs of this kind on the CPU.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="How many GPUs; by default those that are there.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Cores for jobs, by default all.")] = None,
    port: Port = None,
    root: Root = None,
    database: Database = None,
    mlflow: Annotated[bool, typer.Option(help="Also serve MLflow's pages.")] = True,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of MLflow's pages.")] = 5000,
    as_json: options.Json = False,
) -> None:
    """Start everything on this machine: Ray, controller, API, MLflow. What runs already is left as it is."""
    with Output.opened(as_json) as output:
        environment = _environment(port=port, roots=root, database=database)
        settings = Settings.read({**os.environ, **environment})
        kind, device, count = _gpus(emulate, gpus)
        address = settings.home.absolute() / "run" / "ray_address"
        services = {
            "ray": _python("cluster.head", str(address), kind, device, str(count), *([str(cpus)] if cpus else [])),
            "controller": _python("controller.service", str(address)),
            "api": _API,
        }
        if mlflow:
            services["mlflow"] = _mlflow_pages(settings, mlflow_port)
            environment.setdefault(f"{PREFIX}MLFLOW_PAGES", settings.mlflow_pages or f"http://127.0.0.1:{mlflow_port}")
        with output.progress() as bars:
            _start(settings, services, environment)
            health = _wait_until_ready(settings, bars)
        where = _where(settings, mlflow_port if mlflow else None)
        output.result({**where, "health": health.model_dump(mode="json")}, lambda console: _draw(console, where))


def down(as_json: options.Json = False) -> None:
    """Stop what ``lazytrain up`` started. Running jobs go on from their last checkpoint at the next ``up``."""
    with Output.opened(as_json) as output:
        from .. import supervisor

        with output.progress() as bars:
            bars.stage("stopping")
            stopped = supervisor.stop(Settings.read().home.absolute())
        words = f"stopped: {', '.join(stopped)}" if stopped else "nothing was running"
        output.result({"stopped": stopped}, lambda console: console.print(words))


def serve(
    ray_address: Annotated[str, typer.Option(help="HOST:PORT of a Ray cluster that runs already.")],
    host: Annotated[str | None, typer.Option(help="Address to listen on, by default 127.0.0.1.")] = None,
    port: Port = None,
    behind_proxy: Annotated[list[str] | None, typer.Option(help="Name of the TLS proxy in front of the API.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain of the API.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate.")] = None,
    root: Root = None,
    database: Database = None,
    as_json: options.Json = False,
) -> None:
    """Run controller and API in the foreground, for a Ray cluster that others started, until Ctrl-C."""
    with Output.opened(as_json) as output:
        import threading

        from .. import supervisor
        from ..api.service import check_address
        from .signals import stop_on_signal

        environment = _environment(
            ray_address=ray_address,
            host=host,
            port=port,
            names=behind_proxy,
            tls_cert=tls_cert,
            tls_key=tls_key,
            roots=root,
            database=database,
        )
        settings = Settings.read({**os.environ, **environment})
        check_address(settings)
        os.environ.update(environment)
        home = settings.home.absolute()
        _write_services(home, {"controller": _python("controller.service", ray_address), "api": _API})
        where = _where(settings, None)
        output.result(where, lambda console: _draw(console, where))
        told = threading.Event()
        with stop_on_signal() as request:
            worker = threading.Thread(target=supervisor.supervise, args=(home, told))
            worker.start()
            while worker.is_alive() and not request.requested():
                worker.join(0.2)
            told.set()
            worker.join()


# ---- what is started


def _environment(
    *,
    ray_address: str | None = None,
    host: str | None = None,
    port: int | None = None,
    names: list[str] | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    roots: list[Path] | None = None,
    database: str | None = None,
) -> dict[str, str]:
    """Options as the settings that the processes read."""
    given = {
        "RAY_ADDRESS": ray_address,
        "API_HOST": host,
        "API_PORT": port,
        "API_NAMES": ",".join(names) if names else None,
        "TLS_CERT": tls_cert,
        "TLS_KEY": tls_key,
        "ROOTS": ",".join(str(root.absolute()) for root in roots) if roots else None,
        "DATABASE": database,
    }
    return {PREFIX + name: str(value) for name, value in given.items() if value is not None}


def _gpus(emulate: str | None, count: int | None) -> tuple[str, str, int]:
    """Kind, device and number of this machine's GPUs; without one the CPU counts as one. Raises HardwareError."""
    if emulate is not None:
        from ...schedulers.hardware import hardware

        return hardware(emulate).kind, "emulated", count or 1
    names = _nvidia_names()
    if not names:
        return "cpu", "cpu", count or 1
    if len(set(names)) > 1:
        raise HardwareError(
            f"this machine has unlike GPUs: {', '.join(names)}", hint="start one Ray node for each kind, then serve"
        )
    if count is not None and count > len(names):
        raise HardwareError(f"{count} GPUs are asked for, this machine has {len(names)}")
    return names[0], "cuda", count or len(names)


def _nvidia_names() -> list[str]:
    """Names of the NVIDIA GPUs, as the driver gives them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = [tool, "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"{_PACKAGE}.{module}", *arguments]


def _mlflow_pages(settings: Settings, port: int) -> list[str]:
    where = ["--backend-store-uri", settings.tracking_uri, "--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-m", "mlflow", "server", *where, "--workers", "1"]


def _write_services(home: Path, services: Mapping[str, list[str]]) -> None:
    from ..artifacts import write_json
    from ..supervisor import Place

    write_json(Place(home).services, services)


def _start(settings: Settings, services: Mapping[str, list[str]], environment: Mapping[str, str]) -> None:
    from .. import supervisor

    home = settings.home.absolute()
    place = supervisor.Place(home)
    if place.process(supervisor.NAME) is not None:
        return
    for folder in (home, home / "run"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write_services(home, services)
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with place.log(supervisor.NAME).open("ab") as log:
        process = supervisor.start(_python("supervisor", str(home)), log, {**quiet, **environment})
    place.note(supervisor.NAME, process)


def _wait_until_ready(settings: Settings, bars: Bars) -> Health:
    """Until the API answers, a controller leads and a node is there."""
    from ..artifacts import secret_file
    from ..client import Client

    bars.stage("starting Ray, controller and API")
    client = Client(settings.api_url, secret_file(settings.api_token_path), timeout_s=10)
    deadline = time.monotonic() + settings.start_timeout_s
    said = "the API does not answer"
    while time.monotonic() < deadline:
        try:
            health = client.health()
        except Unreachable:
            time.sleep(0.3)
            continue
        if health.leader is not None and health.nodes:
            return health
        said = "no controller leads yet" if health.leader is None else "no node has joined yet"
        time.sleep(0.3)
    raise LazytrainError(
        f"not ready after {settings.start_timeout_s:g} s: {said}", hint=f"the logs are in {settings.log_dir.absolute()}"
    )


# ---- what is said


def _where(settings: Settings, mlflow_port: int | None) -> dict[str, Any]:
    return {
        "dashboard": f"{settings.api_url}/",
        "api": settings.api_url,
        "token_file": str(settings.api_token_path.absolute()),
        "database": settings.database_url.split("@")[-1],
        "logs": str(settings.log_dir.absolute()),
        "mlflow": f"http://127.0.0.1:{mlflow_port}" if mlflow_port else settings.tracking_uri,
    }


def _draw(console: Console, where: Mapping[str, Any]) -> None:
    table = Table(title="lazytrain is up", show_header=False)
    for name, value in where.items():
        table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    console.print("lazytrain submit job.yaml    puts a job into the queue, lazytrain top shows what goes on")
