"""One machine, measured, as the profile that the planner reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...jobs.errors import HardwareError
from ...schedulers.hardware import HardwareProfile
from . import rates
from .disk import DiskTier, probe_disk
from .memory import HostMemory, host_memory
from .pinning import pinned_limit

_DISK_SHARE = 0.5
"""Share of the free disk space that boundaries may take."""


def _gpudirect_problem(directory: Path) -> str:
    from ...jobs.executor.stores.gpudirect import problem_here

    return problem_here(directory)


@dataclass(frozen=True)
class Instruments:
    """The measurements, one by one, so that each can be replaced."""

    memory: Callable[[], HostMemory] = host_memory
    disk: Callable[[Path], DiskTier] = probe_disk
    matmul_flops: Callable[..., float] = rates.matmul_flops
    attention_flops: Callable[..., float] = rates.attention_flops
    host_bytes_s: Callable[[], float] = rates.host_bytes_s
    update_parameters_s: Callable[[], float] = rates.update_parameters_s
    link_bytes_s: Callable[[torch.device], tuple[float, float]] = rates.link_bytes_s
    operation_overhead_s: Callable[..., float] = rates.operation_overhead_s
    pinned_limit_bytes: Callable[[HostMemory, torch.device], int | None] = pinned_limit
    gpudirect_problem: Callable[[Path], str] = _gpudirect_problem


@dataclass(frozen=True)
class Measured:
    """A measured profile, and what a person should know about it."""

    profile: HardwareProfile
    disk: DiskTier | None
    """The NVMe directory that was tried; None when none was given."""
    memory: HostMemory


def measure(
    base: HardwareProfile | None = None,
    *,
    nvme_dir: Path | None = None,
    host_reserve_bytes: int = 0,
    instruments: Instruments | None = None,
) -> Measured:
    """Measure this machine, in under ten seconds on two cores.

    With ``base`` of device ``emulated``, the GPU's memory and links stay as ``base`` has them (they are what is
    emulated), and a disk faster or larger than its NVMe is not used faster or further; all else is measured. Otherwise
    the CUDA device is measured, and without one the CPU. Without a working ``nvme_dir`` there is no NVMe tier. Raises
    HardwareError when ``base`` names a CUDA device that is not there.
    """
    use = instruments or Instruments()
    memory = use.memory()
    disk = use.disk(nvme_dir) if nvme_dir is not None else None
    common = {
        "host_memory_bytes": max(1, memory.free_bytes - host_reserve_bytes),
        "host_bytes_s": use.host_bytes_s(),
        "update_parameters_s": use.update_parameters_s(),
    }
    if base is not None and base.device == "emulated":
        found = _emulated(base, use, disk)
    elif torch.cuda.is_available():
        found = _cuda(use, disk, memory)
    elif base is not None and base.device == "cuda":
        raise HardwareError(f"{base.name} is to be measured, but this machine has no CUDA device")
    else:
        found = _cpu(use, disk, memory)
    profile = HardwareProfile.model_validate({**(base.model_dump() if base else {}), **found, **common})
    return Measured(profile, disk, memory)


def _emulated(base: HardwareProfile, use: Instruments, disk: DiskTier | None) -> dict[str, object]:
    return {
        **_compute(use, torch.device("cpu")),
        "gpudirect": False,
        "nvme_bytes": min(base.nvme_bytes or _room(disk), _room(disk)),
        "nvme_read_bytes_s": min(base.nvme_read_bytes_s, _speed(disk, "read", base.nvme_read_bytes_s)),
        "nvme_write_bytes_s": min(base.nvme_write_bytes_s, _speed(disk, "write", base.nvme_write_bytes_s)),
    }


def _cuda(use: Instruments, disk: DiskTier | None, memory: HostMemory) -> dict[str, object]:
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    free, _ = torch.cuda.mem_get_info(device)
    there, back = use.link_bytes_s(device)
    return {
        "name": name,
        "kind": name,
        "device": "cuda",
        "gpu_memory_bytes": free,
        **_compute(use, device),
        "h2d_bytes_s": there,
        "d2h_bytes_s": back,
        "pinned_limit_bytes": use.pinned_limit_bytes(memory, device),
        "gpudirect": disk is not None and disk.available and not use.gpudirect_problem(disk.path),
        **_disk_fields(disk),
    }


def _cpu(use: Instruments, disk: DiskTier | None, memory: HostMemory) -> dict[str, object]:
    """Without a GPU the device is the host itself, and its links are copies within the host's memory."""
    copy = use.host_bytes_s() / 2
    return {
        "name": "cpu",
        "kind": "cpu",
        "device": "cpu",
        "gpu_memory_bytes": memory.free_bytes,
        **_compute(use, torch.device("cpu")),
        "h2d_bytes_s": copy,
        "d2h_bytes_s": copy,
        **_disk_fields(disk),
    }


def _compute(use: Instruments, device: torch.device) -> dict[str, object]:
    return {
        "matmul_flops": {dtype: use.matmul_flops(dtype, device=device) for dtype in rates.DTYPES},
        "attention_flops": {dtype: use.attention_flops(dtype, device=device) for dtype in rates.DTYPES},
        "operation_overhead_s": use.operation_overhead_s(device=device),
    }


def _disk_fields(disk: DiskTier | None) -> dict[str, object]:
    if disk is None or not disk.available:
        return {"nvme_bytes": 0}
    return {
        "nvme_bytes": _room(disk),
        "nvme_read_bytes_s": disk.read_bytes_s,
        "nvme_write_bytes_s": disk.write_bytes_s,
    }


def _room(disk: DiskTier | None) -> int:
    return int(disk.free_bytes * _DISK_SHARE) if disk is not None else 0


def _speed(disk: DiskTier | None, way: str, otherwise: float) -> float:
    if disk is None or not disk.available:
        return otherwise
    return disk.read_bytes_s if way == "read" else disk.write_bytes_s
