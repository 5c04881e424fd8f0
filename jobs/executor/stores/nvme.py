"""NVMe by the kernel's own calls: direct where the file system can, several requests in flight."""

from __future__ import annotations

import errno
import functools
import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from ..devices.host import page_aligned
from .scratch import ALIGNMENT, ScratchFile, aligned, bytes_of

log = logging.getLogger(__name__)

REQUEST_BYTES = 2 * 2**20
"""Of one request; disks of several lanes reach their bandwidth with a few requests of this size in flight."""
IN_FLIGHT = 8

Transfer = Callable[[int, Sequence[memoryview], int], int]
"""``os.pwritev`` or ``os.preadv``."""


class NvmeFile(ScratchFile):
    """A scratch file read and written with ``preadv`` and ``pwritev`` by a few threads.

    Whole blocks bypass the page cache (``O_DIRECT``), which would take host memory that the plan gives to others and
    copy every byte once more. What is left at a region's end, less than a block, goes through the cache, and so does
    everything where `direct_io_problem` has a reason.
    """

    def _open(self, path: Path) -> None:
        self._problem = direct_io_problem(self.directory)
        self._direct = None if self._problem else os.open(path, os.O_RDWR | os.O_DIRECT)
        if self._direct is not None:
            self._closing.append(weakref.finalize(self, os.close, self._direct))
        self._pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="lazytrain-io")

    @property
    def how(self) -> str:
        return f"buffered I/O, because {self._problem}" if self._problem else "direct I/O"

    def _write(self, offset: int, data: torch.Tensor) -> None:
        self._transfer(os.pwritev, offset, data)

    def _read(self, offset: int, into: torch.Tensor) -> None:
        self._transfer(os.preadv, offset, into)

    def close(self) -> None:
        self._pool.shutdown()
        super().close()

    def _transfer(self, call: Transfer, offset: int, tensor: torch.Tensor) -> None:
        requests = list(self._requests(offset, tensor))
        if len(requests) == 1:
            return _whole(call, *requests[0])
        futures = [self._pool.submit(_whole, call, *request) for request in requests]
        return _all(futures)

    def _requests(self, offset: int, tensor: torch.Tensor) -> Iterator[tuple[int, memoryview, int]]:
        """Descriptor, memory and offset of each request."""
        view = bytes_of(tensor)
        whole = len(view) - len(view) % ALIGNMENT
        if self._direct is None or tensor.data_ptr() % ALIGNMENT or offset % ALIGNMENT:
            whole = 0
        for start in range(0, whole, REQUEST_BYTES):
            assert self._direct is not None
            yield self._direct, view[start : min(start + REQUEST_BYTES, whole)], offset + start
        for start in range(whole, len(view), REQUEST_BYTES):
            yield self._fd, view[start : start + REQUEST_BYTES], offset + start


def _whole(call: Transfer, descriptor: int, view: memoryview, offset: int) -> None:
    """Repeat ``call`` until every byte has moved."""
    done = 0
    while done < len(view):
        count = call(descriptor, [view[done:]], offset + done)
        if not count:
            raise OSError(errno.EIO, f"the file ends {len(view) - done:,} bytes too early")
        done += count


def _all(futures: Sequence[Future[None]]) -> None:
    """Wait for all, because they use the caller's memory, then raise what the first failed one raised."""
    wait(futures)
    for future in futures:
        future.result()


def direct_io_problem(directory: Path) -> str:
    """Why files in ``directory`` cannot bypass the page cache; empty when they can. Tried once per directory.

    Raises OSError where no file can be made there.
    """
    return _tried(directory.resolve())


@functools.cache
def _tried(directory: Path) -> str:
    with tempfile.NamedTemporaryFile(prefix="lazytrain-", suffix=".probe", dir=directory) as file:
        problem = _direct_problem(Path(file.name))
    if problem:
        log.warning("NVMe in %s: buffered I/O, because %s; transfers take host memory and time", directory, problem)
    return problem


def _direct_problem(path: Path) -> str:
    """Write and read one block."""
    written, read = page_aligned(aligned(1)), page_aligned(aligned(1))
    bytes_of(written)[:] = os.urandom(written.nbytes)  # not torch's generator: a run's numbers must not depend on it
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        return f"the file system refuses O_DIRECT ({error.strerror})"
    try:
        _whole(os.pwritev, descriptor, bytes_of(written), 0)
        _whole(os.preadv, descriptor, bytes_of(read), 0)
    except OSError as error:
        return f"blocks of {ALIGNMENT} bytes cannot be transferred directly ({error.strerror})"
    finally:
        os.close(descriptor)
    return "" if torch.equal(written, read) else "a directly written block came back changed"
