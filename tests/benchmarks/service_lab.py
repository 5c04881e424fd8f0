"""A lab for `service`: a fake cluster on this machine, a node for each GPU, and the service that people would start.

Everything is as in production except that the GPUs are emulated and that all nodes share one host: Ray asks for a
token, controller and API are what ``lazytrain serve`` starts, and every run has its own processes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from lazytrain.jobs.errors import Unreachable
from lazytrain.platform.artifacts import secret_file
from lazytrain.platform.client import Client
from lazytrain.platform.schemas import JobView
from lazytrain.platform.settings import Settings
from lazytrain.platform.store import Role, Store
from lazytrain.platform.supervisor import Place

PATIENCE_S = 900.0
_STORE_BYTES = 80 * 2**20


class Lab:
    """Nodes by name with the kind of their GPU, and a service over them with these rules (YAML), until `close`."""

    def __init__(self, folder: Path, kinds: Mapping[str, str], users: tuple[str, ...], rules: str) -> None:
        self.folder = folder
        (folder / "rules.yaml").write_text(rules)
        home = folder / "home"
        given = {"HOME": home, "API_PORT": _free_port(), "ROOTS": folder, "REQUESTS_PER_MINUTE": 100_000}
        given["RULES"] = folder / "rules.yaml"
        os.environ.update({f"LAZYTRAIN_{name}": str(value) for name, value in given.items()})
        self.settings = Settings.read()
        self.place = Place(home)
        _as_every_node_has_it(self.settings)
        self.cluster, self.nodes = _cluster(folder, kinds)
        self.address: str = self.cluster.address
        self._serve = _serve(self.address, folder / "serve.log")
        self.admin = Client(self.settings.api_url, secret_file(self.settings.api_token_path))
        wait_for("the service", lambda: self.admin.health().leader)
        self.clients = {user: Client(self.settings.api_url, token) for user, token in self._tokens(users).items()}
        wait_for("every node", lambda: len([n for n in self.admin.nodes() if n.measured]) == len(kinds))

    def _tokens(self, users: tuple[str, ...]) -> dict[str, str]:
        store = Store(self.settings.database_url)
        try:
            for user in users:
                store.people.add(user, Role.SUBMITTER, time.time())
            return {user: store.people.new_token(user, time.time()) for user in users}
        finally:
            store.close()

    def kill_controller(self) -> float:
        """kill -9 the controller; seconds until another one leads."""
        process, leader = self.place.process("controller"), self.admin.health().leader
        assert process is not None
        began = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        wait_for("another controller", lambda: self.admin.health().leader not in (None, leader))
        return time.monotonic() - began

    def cut_power(self, node: str) -> None:
        """Kill everything of a node at once: nothing on it has the time to say a word."""
        jobs = [job for job in self.admin.jobs() if job.node == node and job.state in ("STARTING", "RUNNING")]
        for process in self.training(jobs):
            process.kill()
        self.cluster.remove_node(self.nodes.pop(node), allow_graceful=False)

    def training(self, jobs: list[JobView] | None = None) -> list[psutil.Process]:
        """Keepers and training processes of these jobs, without any of all."""
        folders = [job.run_dir for job in jobs] if jobs is not None else [str(self.folder)]
        found = []
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:  # it has ended, or is none of ours
                continue
            if "/attempts/" in line and any(folder in line for folder in folders):
                found.append(process)
        return found

    def actors(self) -> list[str]:
        """Named actors that Ray still has."""
        import ray

        from lazytrain.platform.cluster.local import Connection

        connection = Connection(self.settings, self.address)
        try:
            return list(ray.util.list_named_actors())
        finally:
            connection.close()

    def close(self) -> None:
        """Stop the service, then the cluster."""
        self._serve.send_signal(signal.SIGINT)
        try:
            self._serve.wait(60)
        except subprocess.TimeoutExpired:
            self._serve.kill()
        self.cluster.shutdown()

    def left_behind(self) -> list[str]:
        """Command lines of processes that still belong to this lab."""
        wanted = f"LAZYTRAIN_HOME={self.settings.home}".encode()
        found = []
        for process in psutil.process_iter():
            try:
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if process.pid != os.getpid() and wanted in environment:
                    found.append(" ".join(process.cmdline())[:200])
            except (OSError, psutil.Error):
                continue
        return found


def wait_for(name: str, what: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """What it gives once that is true; an API that is away for a while says nothing."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if found := what():
                return found
        except Unreachable:
            pass
        time.sleep(0.2)
    raise AssertionError(f"it did not happen within {seconds:g} s: {name}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _as_every_node_has_it(settings: Settings) -> None:
    """The variables with which Ray is started on a node. Ray reads some of them when it is imported."""
    from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default

    secret_file(settings.ray_token_path)
    for hidden in ("CUDA_VISIBLE_DEVICES", "RAY_AUTH_MODE"):  # as tests have them; no GPUs, no token
        os.environ.pop(hidden, None)
    os.environ |= {
        "RAY_AUTH_TOKEN_PATH": str(settings.ray_token_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_usage_threshold": str(settings.ray_memory_threshold),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    enable_token_auth_by_default()


def _cluster(folder: Path, kinds: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:
    from ray.cluster_utils import Cluster

    from lazytrain.platform.cluster.local import DEVICE_LABEL, KIND_LABEL, NAME_LABEL

    common = {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    nodes = {
        name: cluster.add_node(
            num_cpus=1,
            num_gpus=1,
            labels={KIND_LABEL: kind, DEVICE_LABEL: "emulated", NAME_LABEL: name},
            object_store_memory=_STORE_BYTES,
        )
        for name, kind in kinds.items()
    }
    return cluster, nodes


def _serve(address: str, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from lazytrain.platform.cli import main; main()"]
    with log.open("wb") as file:
        return subprocess.Popen([*command, "serve", "--ray-address", address], stdout=file, stderr=file)
