"""Memory for masters and states: exactly what they take, in large pages where the system gives them on request."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch

_HUGE_PAGE_ADVICE = 14
"""MADV_HUGEPAGE of Linux."""
_PAGE = 1 << 21
_LEAST_BYTES = 4 * _PAGE
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of zeros in host memory; from 8 MiB on in a mapping of its own.

    The C library would cut arrays of up to 32 MiB from its heap, whose gaps stay with the process. Pages of 2 MiB,
    where whole ones lie within the array, make updates a tenth faster: they walk through six arrays.
    Raises MemoryError.
    """
    nbytes = numel * dtype.itemsize
    if nbytes < _LEAST_BYTES:
        return torch.zeros(numel, dtype=dtype)
    try:
        memory = mmap.mmap(-1, nbytes, **_PRIVATE)  # the tensor's storage holds it
    except OSError as error:
        raise MemoryError(f"tried to allocate {nbytes} bytes of host memory: {error.strerror}") from error
    tensor = torch.frombuffer(memory, dtype=dtype)
    _ask_for_large_pages(tensor)
    return tensor


def _ask_for_large_pages(tensor: torch.Tensor) -> None:
    first = -(-tensor.data_ptr() // _PAGE) * _PAGE
    size = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE - first
    advise = _madvise()
    if advise is not None:
        advise(first, size, _HUGE_PAGE_ADVICE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
