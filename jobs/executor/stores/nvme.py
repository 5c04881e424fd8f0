"""Boundaries on NVMe: one preallocated file that no longer has a name, so nothing is left of it after any crash."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import torch

from ...errors import InputError, OutOfMemory


class NvmeFile:
    """A scratch file of ``size`` bytes in ``directory``. Raises OutOfMemory when the disk has no room for it."""

    def __init__(self, directory: Path, size: int) -> None:
        self.size = size
        try:
            self._fd, path = tempfile.mkstemp(prefix="lazytrain-", suffix=".boundaries", dir=directory)
        except OSError as error:
            raise InputError(
                f"cannot use {directory} for boundaries on NVMe: {error.strerror}",
                hint="set plan.nvme to a writable directory on a local NVMe disk",
            ) from error
        Path(path).unlink()
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            os.close(self._fd)
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            free = shutil.disk_usage(directory).free
            raise OutOfMemory(
                tier="nvme", requested_bytes=size, used_bytes=0, budget_bytes=free, hint=f"free space in {directory}"
            ) from error

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Write the bytes of a contiguous host tensor. Raises OSError unless all of them were written."""
        view, done = _bytes_of(data), 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], offset + done)

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill a contiguous host tensor. Raises OSError where the file ends too early."""
        view, done = _bytes_of(into), 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if not count:
                raise OSError(errno.EIO, f"the NVMe file ended at {offset + done} of {self.size} bytes")
            done += count

    def close(self) -> None:
        """Give the space back."""
        os.close(self._fd)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().data)
