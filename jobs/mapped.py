"""Memory in a mapping of its own: it goes back to the system as soon as nobody holds it, whatever lies beside it."""

from __future__ import annotations

import mmap
import sys

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}


def mapped(nbytes: int) -> mmap.mmap:
    """``nbytes`` of zeros from a page's start, of this process alone: it counts as its own, and not as shared.

    Raises MemoryError.
    """
    try:
        return mmap.mmap(-1, nbytes, **_PRIVATE)
    except OSError as error:
        raise MemoryError(f"tried to allocate {nbytes} bytes of host memory: {error.strerror}") from error
