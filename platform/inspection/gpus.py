"""The GPUs of this machine as the driver names them, where they hang on PCIe, and who uses them besides our jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...jobs.units import format_bytes

OURS = ("lazytrain.platform.cluster.run_process", "ray::Profiler", "ray::NodeProfiler")
"""A process with one of these in its command line is a job of ours, or measures the node."""
_NOT_IN_USE_BYTES = 1 << 30
"""Less than this may be held by a display, by the driver, or by the context of a job that is paused."""
_QUERY_S = 60.0

Query = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Device:
    """One GPU."""

    id: str
    """Its UUID: what ``CUDA_VISIBLE_DEVICES`` takes, and the same whatever order a process sees the GPUs in."""
    index: int
    pcie_root: str
    """Root port that it hangs on; GPUs with the same one share its bandwidth. Empty where the kernel does not say."""
    busy: str = ""
    """What uses it from outside, in words; empty if nothing does."""
    driver: str = ""
    """Version of the driver."""


def list_devices(
    query: Query | None = None, root: Path = Path("/"), environment: Mapping[str, str] | None = None
) -> list[Device]:
    """The GPUs that this process may see, by PCI address; none without a driver."""
    ask, seen = query or _nvidia_smi, os.environ if environment is None else environment
    lines = ask(["--query-gpu=index,uuid,pci.bus_id,memory.used,driver_version"]).splitlines()
    found = [[part.strip() for part in line.split(",")] for line in lines if line.strip()]
    ours = _bytes_of_ours(ask, root)
    devices = [
        (
            address.lower(),
            Device(uuid, int(index), pcie_root(address, root), _busy(int(used) << 20, ours.get(uuid, 0)), driver),
        )
        for index, uuid, address, used, driver in found
    ]
    return _visible([device for _, device in sorted(devices, key=lambda pair: pair[0])], seen)


def pcie_root(address: str, root: Path = Path("/")) -> str:
    """The root port above a PCI address such as ``00000000:81:00.0``: ``pci0000:80/0000:80:01.0``."""
    domain, _, rest = address.lower().partition(":")
    path = (root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}").resolve()
    parts = path.parts
    bridge = next((place for place, part in enumerate(parts) if part.startswith("pci") and part != "pci"), None)
    return "/".join(parts[bridge : bridge + 2]) if bridge is not None else ""


def _busy(used_bytes: int, ours_bytes: int) -> str:
    others = used_bytes - ours_bytes
    return f"{format_bytes(others)} of it are in use by something else" if others > _NOT_IN_USE_BYTES else ""


def _bytes_of_ours(ask: Query, root: Path) -> dict[str, int]:
    """Memory that processes of ours use, by GPU."""
    found: dict[str, int] = {}
    for line in ask(["--query-compute-apps=gpu_uuid,pid,used_memory"]).splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[2].isdecimal() and _is_ours(parts[1], root):
            found[parts[0]] = found.get(parts[0], 0) + (int(parts[2]) << 20)
    return found


def _is_ours(pid: str, root: Path) -> bool:
    try:
        command = (root / "proc" / pid / "cmdline").read_bytes().decode(errors="replace")
    except OSError:  # it has ended, or is in another namespace and so not ours
        return False
    return any(name in command for name in OURS)


def _visible(devices: Sequence[Device], environment: Mapping[str, str]) -> list[Device]:
    """Those that ``CUDA_VISIBLE_DEVICES`` names, in its order."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(devices)
    by_name = {str(device.index): device for device in devices} | {device.id: device for device in devices}
    names = [name.strip() for name in named.split(",")]
    return [by_name[name] for name in names if name in by_name]


def _nvidia_smi(arguments: Sequence[str]) -> str:
    """The tool's answer; empty where there is no driver, or it does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        answer = subprocess.run(
            [tool, *arguments, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_QUERY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""
