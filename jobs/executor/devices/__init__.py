"""Devices behind one protocol: `cuda`, `cpu`, and `emulated`, which is a GPU's memory and links on the CPU."""

from __future__ import annotations

import torch

from ...errors import HardwareError
from .base import Device, Event, Stream
from .cpu import CpuDevice, Emulated, EmulatedDevice
from .cuda import CudaDevice

__all__ = ["CpuDevice", "CudaDevice", "Device", "Emulated", "EmulatedDevice", "Event", "Stream", "open_device"]


def open_device(which: str | Emulated) -> Device:
    """Open ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"auto"`` (the GPU if there is one) or an `Emulated` GPU."""
    if isinstance(which, Emulated):
        return EmulatedDevice(which)
    if which == "auto":
        which = "cuda" if torch.cuda.is_available() else "cpu"
    if which == "cpu":
        return CpuDevice()
    if which == "cuda" or which.startswith("cuda:"):
        return CudaDevice(int(which.partition(":")[2] or 0))
    raise HardwareError(f"unknown device {which!r}", hint="use auto, cpu, cuda, cuda:INDEX or emulated:GPU")
