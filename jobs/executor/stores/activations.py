"""Where boundaries wait between forward and backward: on the GPU, on the host, or on NVMe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import ProgramError
from ...policy import Program
from ...replay import padded
from ..devices import Device
from ..internals import Internals
from .nvme import NvmeFile

Key = tuple[int, int]
"""Unit that reads the boundary, and micro-batch."""
Copy = tuple[Callable[[], None], int]
"""The copy itself, and the bytes it moves."""


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and dtype of a boundary."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def front_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The front of a byte buffer, seen as such a tensor."""
        return buffer[: self.bytes].view(self.dtype).view(self.shape)


class ActivationStore:
    """Keeps boundaries of one step. Methods that move data return a `Copy`, to be run on the stream it belongs to."""

    def __init__(self, program: Program, device: Device, nvme_directory: Path) -> None:
        self._device = device
        self._on_gpu: dict[Key, torch.Tensor] = {}
        self._left: dict[Key, Form] = {}  # boundaries that are not on the GPU
        self._host: dict[Key, torch.Tensor] = {}
        self._swapped: dict[Key, list[torch.Tensor]] = {}
        written = [op for op in program.ops if op.kind == "write"]
        self._file = NvmeFile(nvme_directory) if written else None
        self._offset = {(op.unit, op.micro): self._nvme().reserve(op.bytes) for op in written}
        sizes = {(op.unit, op.micro): op.bytes for op in program.ops if op.kind == "offload"}
        self._home = {
            key: device.host_empty(size, torch.uint8) for key, size in sizes.items() if key not in self._offset
        }
        staging = [buffer for buffer in program.buffers if buffer.name.startswith("nvme_staging.")]
        self._ring = [device.host_empty(buffer.bytes, torch.uint8) for buffer in staging]
        self._uses = 0
        swapped = {(op.unit, op.micro): op.bytes for op in program.ops if op.kind == "swap_out"}
        self._internals_home = {key: device.host_empty(size, torch.uint8) for key, size in swapped.items()}

    @property
    def host_bytes(self) -> int:
        """Host memory held for boundaries."""
        return sum(buffer.numel() for buffer in (*self._home.values(), *self._internals_home.values(), *self._ring))

    def put(self, key: Key, boundary: torch.Tensor) -> None:
        """Keep a boundary on the GPU."""
        self._on_gpu[key] = boundary

    def get(self, key: Key) -> torch.Tensor:
        """The boundary, which must be on the GPU."""
        return self._on_gpu[key]

    def drop(self, key: Key) -> None:
        """Forget the GPU's copy, if there is one."""
        self._on_gpu.pop(key, None)

    def offload(self, key: Key) -> Copy:
        """Copy the boundary from the GPU to its host or staging buffer; the GPU's copy is given up."""
        source = self._on_gpu.pop(key)
        self._device.lend(source, "d2h")
        self._left[key] = form = Form(source.shape, source.dtype)
        self._host[key] = target = form.front_of(self._buffer(key))
        return (lambda: _copy(target, source)), source.nbytes

    def write(self, key: Key) -> Copy:
        """Write the staged boundary to NVMe."""
        file, staged = self._nvme(), self._host.pop(key)
        return (lambda: file.write(self._offset[key], staged.view(-1))), staged.nbytes

    def read(self, key: Key) -> Copy:
        """Read the boundary from NVMe into a staging buffer."""
        file = self._nvme()
        self._host[key] = staged = self._left[key].front_of(self._buffer(key))
        return (lambda: file.read(self._offset[key], staged.view(-1))), staged.nbytes

    def reload(self, key: Key) -> Copy:
        """Copy the boundary from the host back to newly taken GPU memory."""
        source, form = self._host.pop(key), self._left.pop(key)
        target = form.front_of(self._device.empty(form.bytes, torch.uint8))
        self._device.lend(target, "h2d")
        self._on_gpu[key] = target
        return (lambda: _copy(target, source)), source.nbytes

    def swap_out(self, key: Key, kept: Internals) -> Copy:
        """Copy a layer's internals from the GPU to the host; the GPU's are given up."""
        sources = [storage.bytes for storage in kept.storages if storage.bytes is not None]
        for source, storage in zip(sources, kept.storages, strict=True):
            self._device.lend(source, "d2h")
            storage.bytes = None
        sizes = [source.numel() for source in sources]
        if sum(map(padded, sizes)) > self._internals_home[key].numel():
            raise ProgramError(
                f"unit {key[0]} keeps {sum(sizes):,} bytes of internals, the program has room for "
                f"{self._internals_home[key].numel():,} on the host",
                hint="plan with internals: none for this model, or for the larger batch",
            )
        targets = self._swapped[key] = pack(self._internals_home[key], sizes)
        return (lambda: _copy_all(targets, sources)), sum(map(padded, sizes))

    def swap_in(self, key: Key, kept: Internals) -> Copy:
        """Copy a layer's internals back to newly taken GPU memory."""
        sources = self._swapped.pop(key)
        targets = [self._device.empty(source.numel(), torch.uint8) for source in sources]
        for target, storage in zip(targets, kept.storages, strict=True):
            self._device.lend(target, "h2d")
            storage.bytes = target
        return (lambda: _copy_all(targets, sources)), sum(padded(source.numel()) for source in sources)

    def clear(self) -> None:
        """Forget everything that is kept (a step was given up)."""
        self._on_gpu.clear()
        self._left.clear()
        self._host.clear()
        self._swapped.clear()

    def close(self) -> None:
        """Give memory and disk space back."""
        self.clear()
        self._home.clear()
        self._internals_home.clear()
        self._ring.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _nvme(self) -> NvmeFile:
        assert self._file is not None, "only boundaries with a place on NVMe are written and read"
        return self._file

    def _buffer(self, key: Key) -> torch.Tensor:
        """The boundary's own host buffer, or for one on NVMe the next staging buffer."""
        if key in self._home:
            return self._home[key]
        self._uses += 1
        return self._ring[self._uses % len(self._ring)]


def pack(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Consecutive aligned parts of a byte buffer."""
    parts, start = [], 0
    for size in sizes:
        parts.append(buffer[start : start + size])
        start += padded(size)
    return parts


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        _copy(target, source)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
