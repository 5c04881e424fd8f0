"""A node that ``deploy/ray/node.sh`` started for real, and the service that joins it, as on a lab's head."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazytrain.jobs.errors import LazytrainError
from lazytrain.platform.client import Client

pytestmark = [pytest.mark.ray, pytest.mark.slow]
NODE = Path(__file__).parents[2] / "deploy" / "ray" / "node.sh"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("0123456789abcdef" * 4 + "\n", encoding="utf-8")
    return file


@pytest.fixture
def head(token: Path) -> Iterator[str]:
    """Address of a head that has, it says, two H800; started and ended as systemd would."""
    port = free_port()
    folder = tempfile.mkdtemp(prefix="lt", dir="/tmp")  # Ray's sockets want a short path
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": folder,
        "RAY_TMPDIR": folder,
        "LAZYTRAIN_RAY_TOKEN": str(token),
        "NODE_PORT": str(port),
        "NODE_NAME": "box",
        "NODE_KIND": "H800",
        "NODE_GPUS": "2",
        "NODE_BLOCK": "--block",
        "PYTHONUNBUFFERED": "1",  # else what Ray says would come at its end
    }
    process = subprocess.Popen(
        ["bash", str(NODE), "head"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM),  # it ends with this process, even if killed
    )
    try:
        yield f"{_address(process)}:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def _address(process: subprocess.Popen[str]) -> str:
    """What Ray says of itself once it is there."""
    assert process.stdout is not None
    said, address = [], ""
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"Local node IP.*?(\d+\.\d+\.\d+\.\d+)", line):  # it may be in bold
            address = found[1]
        if "--block" in line:
            return address
    raise AssertionError("".join(said))


def test_the_service_joins_with_the_token_that_the_settings_name(head: str, token: Path, tmp_path: Path) -> None:
    home, port = tmp_path / "home", free_port()
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "LAZYTRAIN_HOME": str(home),
        "LAZYTRAIN_API_PORT": str(port),
        "LAZYTRAIN_RAY_TOKEN": str(token),
        "LAZYTRAIN_ROOTS": str(tmp_path),
    }
    command = [sys.executable, "-c", "from lazytrain.platform.cli import main; main()", "serve", "--ray-address", head]
    with (tmp_path / "serve.log").open("wb") as log:
        service = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
    try:
        found = _first_nodes(home, port)
    finally:
        service.terminate()
        service.wait(60)
    assert [(node.name, node.kind, node.device, node.gpus) for node in found] == [("box", "H800", "cuda", 2)]


def _first_nodes(home: Path, port: int) -> list:  # type: ignore[type-arg]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            client = Client(f"http://127.0.0.1:{port}", (home / "token").read_text(encoding="utf-8").strip())
            if found := client.nodes():
                return list(found)
        except (LazytrainError, FileNotFoundError):
            pass
        time.sleep(0.3)
    raise AssertionError("\n".join(path.read_text(encoding="utf-8")[-2000:] for path in home.glob("logs/*")))
