"""A Ray of our own on this machine: loopback only, small object store, gone when closed."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from ...jobs.errors import LazytrainError, Unreachable
from ..artifacts import secret_file
from ..openmp import asleep
from ..settings import Settings

_GUARDIAN = Path(__file__).with_name("guardian.py")
_KNOCK_S = 10.0

KIND_LABEL = "lt/gpu-kind"
"""Ray's own accelerator label reads device 0 only and changes its spelling between versions."""
DEVICE_LABEL = "lt/device"
"""``cuda``, ``emulated`` or ``cpu``: what its GPUs really are."""
NAME_LABEL = "lt/node-name"
NAMESPACE = "lazytrain"


class LocalRay:
    """Starts Ray when built and stops all of its processes on `close` (or at the end of a ``with`` block)."""

    def __init__(
        self, settings: Settings, *, kind: str = "", device: str = "", cpus: int | None = None, gpus: int = 1
    ) -> None:
        if ray.is_initialized():
            raise LazytrainError("this process is already connected to a Ray cluster", hint="close that one first")
        self.cpus = cpus or os.cpu_count() or 1
        self._directory = Path(tempfile.mkdtemp(prefix="lt-", dir=settings.ray_temp))
        self._guardian = _start_guardian(self._directory)
        self._environment = _Environment(_variables(settings, self.cpus))
        try:
            self._start(settings, {KIND_LABEL: label_value(kind), DEVICE_LABEL: device, NAME_LABEL: _host_name()}, gpus)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Where other processes of this machine reach it."""
        return str(ray.get_runtime_context().gcs_address)

    def _start(self, settings: Settings, labels: Mapping[str, str], gpus: int) -> None:
        # Ray's name for "this Ray is one machine": every socket is then bound to the loopback address. The variable is
        # for the processes it starts; in this one, Ray has read it when it was imported.
        ray_constants.ENABLE_RAY_CLUSTER = False
        ray.init(
            address="local",
            num_cpus=self.cpus,
            num_gpus=gpus,
            labels={name: value for name, value in labels.items() if value},
            object_store_memory=int(settings.ray_object_store),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            namespace=NAMESPACE,
            _temp_dir=str(self._directory),
        )

    def close(self) -> None:
        """Stop Ray's processes and delete its session directory; safe to call twice."""
        try:
            ray.shutdown()
        finally:
            self._environment.restore()
            shutil.rmtree(self._directory, ignore_errors=True)
            self._guardian.communicate()

    def __enter__(self) -> LocalRay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start_guardian(directory: Path) -> subprocess.Popen[bytes]:
    """A process that cleans up after us in case we are killed; it ends when its standard input is closed."""
    command = [sys.executable, "-I", "-S", str(_GUARDIAN), str(os.getpid()), str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def label_value(text: str) -> str:
    """``text`` as a Ray label value: letters, digits, ``-``, ``_`` and ``.``, at most 63 characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:63]


def _host_name() -> str:
    return label_value(platform.node()) or "local"


class Connection:
    """This process as a client of a Ray that others started, until `close`."""

    def __init__(self, settings: Settings, address: str, environment: Mapping[str, str] | None = None) -> None:
        """``environment`` is for the processes that Ray starts for this one."""
        if ray.is_initialized():
            raise LazytrainError("this process is already connected to a Ray cluster", hint="close that one first")
        _knock(address)
        self._environment = _Environment(_variables(settings, os.cpu_count() or 1))
        extra = {"runtime_env": {"env_vars": dict(environment)}} if environment else {}
        if settings.ray_auth == "token":
            # Ray has read its variables when it was imported; unlike a new cluster, a client does not read them again.
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        if address.startswith("127."):
            ray_constants.ENABLE_RAY_CLUSTER = (
                False  # as for the one that started it, else Ray looks at another address
            )
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.CRITICAL, **extra)
        except (ConnectionError, RuntimeError, ValueError) as error:
            self._environment.restore()
            raise _no_ray_at(address, str(error).splitlines()[0]) from error

    def close(self) -> None:
        """Disconnect; what runs goes on."""
        ray.shutdown()
        self._environment.restore()


def _knock(address: str) -> None:
    """Raise Unreachable where nothing listens: Ray itself would try for minutes, and end the process after that."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _no_ray_at(address, str(error)) from error


def _no_ray_at(address: str, why: str) -> Unreachable:
    return Unreachable(
        f"no Ray answers at {address}: {why}",
        hint="it is HOST:PORT of a Ray that runs; its token is the one of whoever started it (LAZYTRAIN_HOME)",
    )


def _variables(settings: Settings, cpus: int) -> dict[str, str | None]:
    """What Ray and the processes it starts read from the environment; None is a variable that must not be set."""
    variables: dict[str, str | None] = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Ray has read this variable when it was imported; without it a new local cluster asks for a token.
        "RAY_AUTH_MODE": None if settings.ray_auth == "token" else settings.ray_auth,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_memory_usage_threshold": str(settings.ray_memory_threshold),
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_DEDUP_LOGS": "0",
        # The newer output of Ray Tune prints a table whatever its verbosity.
        "RAY_AIR_NEW_OUTPUT": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        # Ray gives a worker one OpenMP thread per reserved CPU unless the variable is there.
        "OMP_NUM_THREADS": str(cpus),
        **asleep(),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if settings.ray_auth == "token":
        secret_file(settings.ray_token_path)
        variables["RAY_AUTH_TOKEN_PATH"] = str(settings.ray_token_path)
    return variables


class _Environment:
    """Variables set for as long as Ray runs, because its C++ side reads them at its own times.

    Those that it has read already it is made to read again: a process that has been in a Ray with tokens would refuse
    the calls of one without.
    """

    def __init__(self, variables: Mapping[str, str | None]) -> None:
        self._before = {name: os.environ.get(name) for name in variables}
        _set(variables)

    def restore(self) -> None:
        _set(self._before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
