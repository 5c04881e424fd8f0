"""NVMe through NVIDIA's kvikio, which moves bytes between the disk and GPU memory itself (GPUDirect Storage)."""

from __future__ import annotations

import errno
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from ...errors import InputError
from .scratch import ScratchFile


def available() -> bool:
    """Whether kvikio is installed."""
    return importlib.util.find_spec("kvikio") is not None


class KvikioFile(ScratchFile):
    """A scratch file whose transfers take tensors on the host and on the GPU alike.

    Where the driver or the file system has no GPUDirect Storage, kvikio itself goes through host memory.
    """

    def _open(self, path: Path) -> None:
        if not available():
            raise InputError("GPUDirect Storage needs kvikio", hint="pip install kvikio-cu12, or leave it out")
        self._file: Any = importlib.import_module("kvikio").CuFile(path, "r+")

    @property
    def how(self) -> str:
        return "kvikio: GPUDirect Storage where driver and file system have it"

    def _write(self, offset: int, data: torch.Tensor) -> None:
        array = _array(data)
        _check(self._file.pwrite(array, data.nbytes, offset).get(), data.nbytes)

    def _read(self, offset: int, into: torch.Tensor) -> None:
        array = _array(into)
        _check(self._file.pread(array, into.nbytes, offset).get(), into.nbytes)

    def close(self) -> None:
        self._file.close()
        super().close()


def _array(tensor: torch.Tensor) -> Any:
    """The tensor's bytes as kvikio takes them: CUDA tensors by their array interface, others as numpy arrays."""
    flat = tensor.view(-1).view(torch.uint8)
    return flat if flat.is_cuda else flat.numpy()


def _check(moved: int, wanted: int) -> None:
    if moved != wanted:
        raise OSError(errno.EIO, f"only {moved:,} of {wanted:,} bytes were moved")
