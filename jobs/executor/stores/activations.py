"""Where boundaries wait between forward and backward: on the GPU, on the host, or on NVMe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

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
        self._offset = {(op.unit, op.micro): i * op.bytes for i, op in enumerate(written)}
        self._file = NvmeFile(nvme_directory, sum(op.bytes for op in written)) if written else None
        capacity = {(op.unit, op.micro): op.bytes for op in program.ops if op.kind == "offload"}
        self._host_buffers = self._allocate(program, capacity)
        self._turn: Counter[str] = Counter()

    def _allocate(self, program: Program, capacity: dict[Key, int]) -> dict[object, torch.Tensor]:
        """One host buffer per boundary that lives there, and a ring for each direction of those on NVMe."""
        sizes: dict[object, int] = {key: size for key, size in capacity.items() if key not in self._offset}
        for buffer in program.buffers:
            kind, _, slot = buffer.name.partition("_staging.")
            if kind in ("write", "read"):
                sizes[kind, int(slot)] = buffer.bytes
        sizes |= {("internals", (op.unit, op.micro)): op.bytes for op in program.ops if op.kind == "swap_out"}
        return {key: self._device.host_empty(size, torch.uint8) for key, size in sizes.items()}

    @property
    def host_bytes(self) -> int:
        """Host memory held for boundaries."""
        return sum(buffer.numel() for buffer in self._host_buffers.values())

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
        self._host[key] = target = form.front_of(self._buffer(key, "write"))
        return (lambda: _copy(target, source)), source.nbytes

    def write(self, key: Key) -> Copy:
        """Write the staged boundary to NVMe."""
        file, staged = self._nvme(), self._host.pop(key)
        return (lambda: file.write(self._offset[key], staged.view(-1))), staged.nbytes

    def read(self, key: Key) -> Copy:
        """Read the boundary from NVMe into a staging buffer."""
        file = self._nvme()
        self._host[key] = staged = self._left[key].front_of(self._buffer(key, "read"))
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
        targets = self._swapped[key] = pack(self._host_buffers["internals", key], sizes)
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
        self._turn.clear()

    def close(self) -> None:
        """Give memory and disk space back."""
        self.clear()
        self._host_buffers.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _nvme(self) -> NvmeFile:
        assert self._file is not None, "only boundaries with a place on NVMe are written and read"
        return self._file

    def _buffer(self, key: Key, kind: str) -> torch.Tensor:
        if key not in self._offset:
            return self._host_buffers[key]
        slots = sum(1 for name in self._host_buffers if isinstance(name, tuple) and name[0] == kind)
        slot, self._turn[kind] = self._turn[kind] % slots, self._turn[kind] + 1
        return self._host_buffers[kind, slot]


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
