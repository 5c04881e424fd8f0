"""What a scratch file on NVMe is to the stores: room that is reserved before the first step, and typed failures."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from pathlib import Path

import torch

from ...errors import InputError, OutOfMemory, StorageError

ALIGNMENT = 4096
"""Bytes; direct I/O wants offsets and memory at multiples of the disk's block, and no disk has larger ones."""
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class ScratchFile(ABC):
    """A file without a name, so that nothing is left of it after any end, a kill included.

    Room comes from `reserve`; transfers of different regions may run at the same time. Tensors must be contiguous.
    """

    def __init__(self, directory: Path) -> None:
        """Raises InputError where no file can be made in ``directory``."""
        self.directory, self.size = directory, 0
        self._fd, path = _make(directory)
        self._closing = [weakref.finalize(self, os.close, self._fd)]  # its room is taken as long as it is open
        try:
            self._open(path)
        except BaseException:
            self._closing[0]()
            raise
        finally:
            path.unlink()

    @property
    @abstractmethod
    def how(self) -> str:
        """How bytes move, in words, with the reason where it is not the fastest way."""

    @abstractmethod
    def _open(self, path: Path) -> None:
        """Take what else is needed while the file still has its name."""

    @abstractmethod
    def _write(self, offset: int, data: torch.Tensor) -> None: ...

    @abstractmethod
    def _read(self, offset: int, into: torch.Tensor) -> None: ...

    def reserve(self, nbytes: int) -> int:
        """Make room for ``nbytes`` more; their offset. Raises OutOfMemory when the disk has no room."""
        offset, length = self.size, aligned(nbytes)
        try:
            if length:
                os.posix_fallocate(self._fd, offset, length)
        except OSError as error:
            raise self._typed(error, "reserve", length) from error
        self.size = offset + length
        return offset

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Write all bytes of ``data``. Raises OutOfMemory when the disk is full, StorageError when it fails."""
        try:
            self._write(offset, data)
        except OSError as error:
            raise self._typed(error, "write", data.nbytes) from error

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into``. Raises StorageError when the disk fails or the file ends too early."""
        try:
            self._read(offset, into)
        except OSError as error:
            raise self._typed(error, "read", into.nbytes) from error

    def close(self) -> None:
        """Give the space back."""
        for close in self._closing:
            close()

    def _typed(self, error: OSError, what: str, nbytes: int) -> OutOfMemory | StorageError:
        if error.errno in _FULL:
            free = shutil.disk_usage(self.directory).free
            return OutOfMemory(
                tier="nvme",
                requested_bytes=nbytes,
                used_bytes=self.size,
                budget_bytes=self.size + free,
                hint=f"free space in {self.directory}, raise its quota, or plan with less NVMe (plan --nvme)",
            )
        return StorageError(
            f"cannot {what} {nbytes:,} bytes on nvme in {self.directory}: {error.strerror or error}",
            tier="nvme",
            nbytes=nbytes,
            hint="check the disk (dmesg, smartctl) or name another directory as plan.nvme; resume from the checkpoint",
        )


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to whole blocks."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def _make(directory: Path) -> tuple[int, Path]:
    try:
        descriptor, path = tempfile.mkstemp(prefix="lazytrain-", suffix=".scratch", dir=directory)
    except OSError as error:
        raise InputError(
            f"cannot keep anything on nvme in {directory}: {error.strerror}",
            hint="set plan.nvme to a writable directory on a local NVMe disk",
        ) from error
    return descriptor, Path(path)
