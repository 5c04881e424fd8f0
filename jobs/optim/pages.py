"""Memory for masters and states: exactly what they take, in large pages where the system gives them on request."""

from __future__ import annotations

import contextlib
import mmap
import sys

import torch

from ..mapped import mapped

_LARGE_PAGE = 1 << 21
_LEAST_BYTES = 4 * _LARGE_PAGE


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of zeros in host memory; from 8 MiB on in a mapping of its own.

    The C library would cut arrays of up to 32 MiB from its heap, whose gaps stay with the process. Pages of 2 MiB,
    where whole ones lie within the array, make updates a tenth faster: they walk through six arrays.
    Raises MemoryError.
    """
    nbytes = numel * dtype.itemsize
    if nbytes < _LEAST_BYTES:
        return torch.zeros(numel, dtype=dtype)
    memory, begin = mapped(nbytes)
    tensor = torch.frombuffer(memory, dtype=dtype, count=numel, offset=begin)  # its storage holds the mapping
    if sys.platform == "linux":
        first = begin + -tensor.data_ptr() % _LARGE_PAGE
        end = begin + nbytes - (tensor.data_ptr() + nbytes) % _LARGE_PAGE
        with contextlib.suppress(OSError):  # a kernel without large pages has none to give
            memory.madvise(mmap.MADV_HUGEPAGE, first, end - first)
    return tensor
