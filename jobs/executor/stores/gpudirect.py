"""NVMe straight from GPU memory and back: GPUDirect Storage, by way of NVIDIA's ``kvikio``.

Written against the Python interface of kvikio 26.10 (``CuFile.raw_write_async``, ``raw_read_async``), and not yet run
on a GPU. Each request is put on a CUDA stream of its own, and the thread of the NVMe stream waits for it and so knows
how many bytes moved; kvikio's blocking calls would wait for all of the default stream, compute included.

cuFile takes GPU memory of its own for what is not aligned to blocks (``max_device_cache_size`` in ``cufile.json``), and
may pass through the host where a file system does not support it (``allow_compat_mode`` there); kvikio does not say for
which files it does. Kvikio's own fallback through the host is refused: it would take memory that no plan counts.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...errors import HardwareError, LazytrainError
from ..devices import Device, open_device
from .scratch import ALIGNMENT, ScratchFile

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class GpuDirectFile(ScratchFile):
    """A scratch file whose regions are written from, and read to, memory of the device."""

    def __init__(self, directory: Path, device: Device) -> None:
        """Raises InputError where no file can be made, HardwareError where it cannot be reached from the GPU."""
        self._device = device
        super().__init__(directory)

    @property
    def how(self) -> str:
        return "GPUDirect Storage"

    def _open(self, path: Path) -> None:
        kvikio = _kvikio()
        try:
            with kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF):
                self._file = kvikio.CuFile(path, "r+")
        except (RuntimeError, OSError) as error:
            raise HardwareError(
                f"a file in {self.directory} cannot be reached from the GPU: {error}",
                hint="name a directory on a local NVMe disk (ext4 or XFS), or plan without GPUDirect Storage",
            ) from error

    def _write(self, offset: int, data: torch.Tensor) -> None:
        self._move("nvme_write", self._file.raw_write_async, offset, data)

    def _read(self, offset: int, into: torch.Tensor) -> None:
        self._move("nvme_read", self._file.raw_read_async, offset, into)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _move(self, name: str, call: Callable[..., Any], offset: int, tensor: torch.Tensor) -> None:
        """Whole blocks in one request, which needs no memory of cuFile's, then what is left of the last one."""
        flat = tensor.view(-1).view(torch.uint8)
        whole = flat.numel() - flat.numel() % ALIGNMENT
        with self._device.io_stream(name) as stream:
            for start, end in ((0, whole), (whole, flat.numel())):
                try:
                    _all_of(call, flat[start:end], stream, offset + start)
                except RuntimeError as error:
                    raise _as_os_error(error) from error


def _all_of(call: Callable[..., Any], part: torch.Tensor, stream: int, offset: int) -> None:
    """Repeat ``call`` until every byte has moved."""
    done = 0
    while done < part.numel():
        left = part[done:]
        count = call(left, stream, left.numel(), offset + done).check_bytes_done()
        if not count:
            raise OSError(errno.EIO, f"the file ends {left.numel():,} bytes too early")
        done += count


def _as_os_error(error: RuntimeError) -> OSError:
    """Kvikio gives the system's words, not its number."""
    text = str(error)
    number = next((n for n in _FULL if os.strerror(n) in text), errno.EIO)
    return OSError(number, text)


def _kvikio() -> Any:
    importlib.import_module("kvikio.cufile_driver")
    importlib.import_module("kvikio.defaults")
    return importlib.import_module("kvikio")


def check_gpudirect(device: Device, directory: Path) -> None:
    """Raise HardwareError unless files in ``directory`` can be reached from the device."""
    if problem := gpudirect_problem(device, directory):
        raise HardwareError(
            f"the policy moves boundaries between GPU memory and NVMe directly, which cannot be done here: {problem}",
            hint="plan again on this machine, or set direct_nvme to false in the policy",
        )


def gpudirect_problem(device: Device, directory: Path) -> str:
    """Why files in ``directory`` cannot be reached from the device; empty when they can. Tried once per directory."""
    if not device.has_direct_io:
        return f"{type(device).__name__} is no GPU of NVIDIA's"
    if problem := missing():
        return problem
    key = (str(device.torch_device), directory.resolve())
    if key not in _tried:
        _tried[key] = _problem_of_a_block(device, key[1])
    return _tried[key]


_tried: dict[tuple[str, Path], str] = {}


def problem_here(directory: Path) -> str:
    """The same for the GPU that is current, where nothing has opened it."""
    if problem := missing():
        return problem
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    device = open_device(f"cuda:{torch.cuda.current_device()}")
    try:
        return gpudirect_problem(device, directory)
    finally:
        device.close()


def missing() -> str:
    """What GPUDirect Storage lacks on this machine, whatever the directory; empty if nothing."""
    try:
        kvikio = _kvikio()
    except (ImportError, OSError) as error:  # OSError: a library of CUDA's that it loads
        return f"kvikio cannot be imported ({error}); pip install 'lazytrain[gds]'"
    try:
        available = kvikio.cufile_driver.get("is_gds_available")
    except RuntimeError as error:  # cuFile's own
        return f"cuFile cannot be used ({error})"
    if not available:
        return "cuFile finds no GPUDirect Storage driver (nvidia-fs is not loaded)"
    if kvikio.defaults.is_compat_mode_preferred():
        return "kvikio is in compatibility mode, which passes through host memory (KVIKIO_COMPAT_MODE)"
    return ""


def _problem_of_a_block(device: Device, directory: Path) -> str:
    """Write and read a block and a half."""
    with device.counting():
        written = torch.arange(ALIGNMENT * 3 // 2, device=device.torch_device).to(torch.uint8)
        read = torch.zeros_like(written)
        device.compute_event().wait()  # both are there
    try:
        file = GpuDirectFile(directory, device)
    except LazytrainError as error:
        return error.message
    try:
        offset = file.reserve(written.numel())
        file.write(offset, written)
        file.read(offset, read)
    except LazytrainError as error:
        return error.message
    finally:
        file.close()
    return "" if torch.equal(written, read) else "a directly written block came back changed"
