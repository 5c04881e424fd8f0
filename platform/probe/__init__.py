"""Measuring a machine: `measure` gives the hardware profile, `probe_disk` and `host_memory` are its parts."""

from .disk import DiskTier, probe_disk
from .machine import Instruments, Measured, measure
from .memory import HostMemory, host_memory

__all__ = ["DiskTier", "HostMemory", "Instruments", "Measured", "host_memory", "measure", "probe_disk"]
