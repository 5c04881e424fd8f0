"""How much host memory a process may pin: the memory-lock limit, where the GPU's driver is held to it.

A control group's limit on memory holds for pinned memory too; `host_memory` has that one.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .memory import HostMemory

if TYPE_CHECKING:
    from ...jobs.executor.devices.pinned import Driver

_LARGEST_TRIAL = 2**30
"""Pinning takes time for each page: a limit beyond this is believed."""
_BEYOND = 2**20


def pinned_limit(memory: HostMemory, device: torch.device) -> int | None:
    """Bytes of host memory that a process may pin for this GPU; None for as much as there is."""
    from ...jobs.executor.devices.cuda import CudaDriver  # with it comes all of transformers

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return limit_that_holds(soft, memory, lambda nbytes: can_pin(nbytes, CudaDriver(device)))


def limit_that_holds(soft_bytes: int, memory: HostMemory, can_pin: Callable[[int], bool]) -> int | None:
    """``soft_bytes`` (of ``RLIMIT_MEMLOCK``) if it keeps a process from pinning all of ``memory``, else None.

    Some drivers are not held to it, nor is a privileged process; ``can_pin`` tells by trying to pin more.
    """
    if soft_bytes == resource.RLIM_INFINITY or soft_bytes >= memory.free_bytes:
        return None
    if soft_bytes < _LARGEST_TRIAL and can_pin(soft_bytes + _BEYOND):
        return None
    return soft_bytes


def can_pin(nbytes: int, driver: Driver) -> bool:
    """Whether the driver pins so many bytes at once; they are given back."""
    from ...jobs.executor.devices.host import page_aligned

    tensor = page_aligned(nbytes)
    if driver.register(tensor.data_ptr(), nbytes) != 0:
        driver.settle()
        return False
    driver.unregister(tensor.data_ptr())
    return True
