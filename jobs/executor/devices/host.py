"""Host memory that begins at a page and is exactly as large as asked, on a chosen NUMA node where there are several."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from ...mapped import mapped
from .cores import numbers

log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
MORE_HOST_MEMORY = "plan with less host memory (plan.host_memory), raise `ulimit -l`, or put more on NVMe"
"""What to do where the host has no memory left."""
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call ``mbind`` (Linux: arch/x86/entry/syscalls/syscall_64.tbl, uapi/asm-generic/unistd.h)."""
_MPOL_PREFERRED = 1
"""Take pages of the node while it has some, then of others (mbind(2)): a full node slows the job, never ends it."""


def page_aligned(
    nbytes: int, node: int | None = None, before_free: Callable[[int], None] | None = None
) -> torch.Tensor:
    """``nbytes`` of zeroed host memory (uint8), from a page's start; the last page is rounded up and nothing else.

    Torch's pinned allocator would round to a power of two. With ``node``, pages come from that NUMA node when they are
    first touched, if it has room. ``before_free`` is called with the address when nobody holds the memory any more and
    it is about to be unmapped. Raises MemoryError.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    length = -(-nbytes // PAGE) * PAGE
    memory, begin = mapped(length)
    if sys.platform == "linux":
        # A page that a forked process shares may change places at the next write: not for a GPU.
        memory.madvise(mmap.MADV_DONTFORK)
    held = (ctypes.c_ubyte * nbytes).from_buffer(memory, begin)  # the tensor's storage holds it
    tensor = torch.frombuffer(held, dtype=torch.uint8)
    if node is not None:
        _prefer(tensor.data_ptr(), length, node)
    if before_free is not None:
        finalizer = weakref.finalize(held, _free, memory, before_free, tensor.data_ptr())
        finalizer.atexit = False  # the process's end gives everything back
    return tensor


def _free(memory: mmap.mmap, before_free: Callable[[int], None], address: int) -> None:
    before_free(address)
    del memory  # held until here, so that the pages were still mapped


def _prefer(address: int, length: int, node: int) -> None:
    number = _MBIND.get(platform.machine())
    if number is None:
        return log.info("NUMA: no mbind on %s, buffers lie where the kernel puts them", platform.machine())
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(length), _MPOL_PREFERRED, words, ctypes.c_ulong(node + 2), 0)
    if libc.syscall(ctypes.c_long(number), *arguments) != 0:
        reason = os.strerror(ctypes.get_errno())
        log.info("NUMA: buffers stay where the kernel puts them, node %d was refused: %s", node, reason)
    return None


def numa_nodes(root: Path = Path("/sys")) -> list[int]:
    """Numbers of this machine's NUMA nodes that hold memory; empty where the kernel does not say."""
    try:
        text = (root / "devices/system/node/has_memory").read_text(encoding="ascii").strip()
    except OSError:
        return []
    return numbers(text)


def numa_node_of(pci_address: str, root: Path = Path("/sys")) -> int | None:
    """The NUMA node next to a PCI device such as ``0000:3b:00.0``; None on one node, or where it is not known."""
    nodes = numa_nodes(root)
    if len(nodes) < 2:
        return None
    try:
        text = (root / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text(encoding="ascii")
    except OSError:
        return None
    node = int(text)
    return node if node in nodes else None
