"""Memory in a mapping of its own: it goes back to the system as soon as nobody holds it, whatever lies beside it."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from typing import Final

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}
PLACES: Final = 64
"""Pages in a row that caches tell apart."""
_place = itertools.cycle(range(PLACES))


def mapped(nbytes: int) -> tuple[mmap.mmap, int]:
    """``nbytes`` of zeros of this process alone, which count as its own and not as shared; and where they begin.

    Mappings lie side by side, and a processor looks for a cache line by a part of its address: arrays that are a power
    of two apart push each other's lines out, which made an update of 2^28 parameters take twice as long. So what is
    asked for begins at a page, but of ``PLACES`` pages at the next one each time; those before it are never touched.
    Raises MemoryError.
    """
    apart = PLACES * mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, apart + nbytes, **_PRIVATE)
    except OSError as error:
        raise MemoryError(f"tried to allocate {nbytes} bytes of host memory: {error.strerror}") from error
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memory, (next(_place) * mmap.PAGESIZE - address) % apart
