"""Failures that others raise in a step, as errors that say which tier failed, how much it wanted and what to change."""

from __future__ import annotations

import os
import re

import torch

from ..errors import LazytrainError, OutOfMemory, StepFailed, StorageError
from ..policy import Op
from .devices.host import MORE_HOST_MEMORY

_UNITS = {"": 1, "b": 1, "bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_WANTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|B|KiB|MiB|GiB)?", re.IGNORECASE)
_HOST = ("DefaultCPUAllocator", "cudaHostAlloc", "cudaHostRegister", "pin memory", "pinned")
"""Words in torch's messages when it is the host that has no memory left."""
_GPU = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Words in messages of the driver and of libraries that take GPU memory beside torch's allocator."""


def in_compute(error: BaseException) -> BaseException:
    """What to raise for an error of a compute operation: out of memory with its tier, the model's own as it is."""
    found = out_of_memory(error) if isinstance(error, (RuntimeError, MemoryError)) else None
    return found or error


def in_stream(op: Op, error: BaseException) -> LazytrainError:
    """What to raise for an error of a transfer or of an update."""
    if isinstance(error, LazytrainError):
        return error
    found = out_of_memory(error)
    if found is not None:
        return found
    if isinstance(error, OSError):
        what = f"{op.id} failed to move {op.bytes:,} bytes: {error.strerror or error}"
        return StorageError(
            what, nbytes=op.bytes, hint="check the disk (dmesg, smartctl), or name another as plan.nvme"
        )
    return StepFailed(
        f"{op.id} failed on stream {op.stream}: {type(error).__name__}: {error}",
        op=op.id,
        stream=op.stream,
        hint="the weights are as before the step unless it is an update; run it again, or resume from the checkpoint",
    )


def out_of_memory(error: BaseException) -> OutOfMemory | None:
    """The error as one of ours, if memory is what it is about."""
    text = str(error)
    if isinstance(error, MemoryError) or (any(word in text for word in _HOST) and "memory" in text.lower()):
        total, free = _host_memory()
        return OutOfMemory(
            tier="host",
            requested_bytes=_wanted(text),
            used_bytes=total - free,
            budget_bytes=total,
            hint=MORE_HOST_MEMORY,
        )
    if isinstance(error, torch.OutOfMemoryError) or any(word in text for word in _GPU):
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        return OutOfMemory(tier="gpu", requested_bytes=_wanted(text), used_bytes=total - free, budget_bytes=total)
    return None


def _wanted(text: str) -> int:
    found = _WANTED.search(text)
    return int(float(found[1]) * _UNITS[(found[2] or "").lower()]) if found else 0


def _host_memory() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
