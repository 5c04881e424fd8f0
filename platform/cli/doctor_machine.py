"""What ``lazytrain doctor`` asks of the operating system: driver, GPUs, limits, shared memory, clock."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...jobs.units import format_bytes
from ..settings import Settings

Verdict = Literal["ok", "warning", "failed"]
_OPEN_FILES = 65536
_UNSYNCHRONISED = 5
"""What the kernel answers (TIME_ERROR) when nothing keeps its clock right."""


@dataclass(frozen=True)
class Finding:
    """What one check found; ``fix`` says what to do when it is not ok."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Driver:
    """What the NVIDIA driver says without CUDA."""

    version: str
    gpus: tuple[str, ...]


def driver() -> Driver | None:
    """The driver's answer; None where there is no GPU. Raises RuntimeError when it is there and does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        if Path("/dev/nvidiactl").exists():
            raise RuntimeError("there is an NVIDIA GPU, but no nvidia-smi")
        return None
    asked = [tool, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode != 0:
        raise RuntimeError((answer.stdout + answer.stderr).strip() or f"nvidia-smi ended with {answer.returncode}")
    rows = [line.split(", ", 1) for line in answer.stdout.splitlines() if ", " in line]
    return Driver(rows[0][0], tuple(name for _, name in rows)) if rows else None


def check_driver() -> Finding:
    """Whether the driver answers."""
    try:
        found = driver()
    except RuntimeError as error:
        fix = "install the driver's tools; in a container, give it the utility capability and --gpus all"
        return Finding("driver", "failed", str(error).splitlines()[0], fix)
    if found is None:
        return Finding("driver", "ok", "no NVIDIA GPU on this machine")
    return Finding("driver", "ok", f"{found.version}: {', '.join(found.gpus)}")


def check_visible() -> Finding:
    """Whether PyTorch sees the GPUs that the driver has."""
    import torch

    try:
        has = driver()
    except RuntimeError:
        has = None
    there, seen = len(has.gpus) if has else 0, torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"{seen} of {there}"
    if seen == there:
        return Finding("visible GPUs", "ok", found)
    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return Finding(
            "visible GPUs", "warning", f"{found} (CUDA_VISIBLE_DEVICES={chosen})", "unset it to use them all"
        )
    if not torch.version.cuda:
        fix = "this PyTorch is built for CPUs: pip install --force-reinstall torch, from its index for CUDA"
        return Finding("visible GPUs", "failed", found, fix)
    fix = (
        f"is driver {has.version if has else '(none)'} new enough for CUDA {torch.version.cuda}? update one of the two"
    )
    return Finding("visible GPUs", "failed", found, fix)


def check_open_files() -> Finding:
    """Whether Ray and a data reader may have the files they want."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES:
        return Finding("open files", "ok", f"{soft:,} (ulimit -n)")
    fix = f"ulimit -n {_OPEN_FILES}" + (" (as root, or in /etc/security/limits.conf)" if hard < _OPEN_FILES else "")
    return Finding("open files", "warning", f"{soft:,} (ulimit -n)", f"{fix}: a node with many jobs opens many sockets")


def check_shared_memory(settings: Settings, folder: Path = Path("/dev/shm")) -> Finding:
    """Whether Ray's object store fits."""
    wanted = int(settings.ray_object_store)
    if not folder.is_dir():
        return Finding("shared memory", "warning", f"no {folder}", "mount a tmpfs there: Ray would use a slow disk")
    free = shutil.disk_usage(folder).free
    found = f"{format_bytes(free)} free in {folder}, Ray takes {format_bytes(wanted)}"
    if free < wanted:
        fix = "docker run --shm-size 256m; on Kubernetes an emptyDir with medium: Memory"
        return Finding("shared memory", "failed", found, fix)
    return Finding("shared memory", "ok", found)


def check_clock() -> Finding:
    """Whether something keeps the clock right: leases and the times of events compare clocks of several nodes."""
    state = clock_state()
    if state < 0:
        return Finding("clock", "warning", "the kernel does not say", "see that chrony or systemd-timesyncd runs")
    if state == _UNSYNCHRONISED:
        fix = "run chrony or systemd-timesyncd; in a container, on its host"
        return Finding("clock", "warning", "nothing synchronises it", fix)
    return Finding("clock", "ok", "synchronised")


def clock_state() -> int:
    """What the kernel says of its clock: 0 to 4 is synchronised, 5 is not, -1 is no answer."""
    try:
        # A struct timex of zeros asks without changing anything; 208 bytes are its size, with room to spare.
        return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))
    except AttributeError:  # no Linux
        return -1
