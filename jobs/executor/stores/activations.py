"""Where boundaries wait between forward and backward: on the GPU, on the host, or on NVMe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from ...errors import ProgramError
from ...memory import unseen
from ...policy import Op, Program
from ...policy.program import Kind
from ...replay import padded
from ..devices import Device
from ..internals import Internals, whole
from .gpudirect import GpuDirectFile
from .nvme import NvmeFile
from .scratch import ScratchFile

Room = TypeVar("Room")
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
        with unseen():
            return buffer[: self.bytes].view(self.dtype).view(self.shape)


class ActivationStore:
    """Keeps boundaries of one step. Methods that move data return a `Copy`, to be run on the stream it belongs to.

    A unit has as many rooms on the host (or on NVMe) as there are micro-batches whose boundary waits there at a time.
    What is not there any more, because its micro-batch was dropped, or there already, is not moved.
    """

    def __init__(self, device: Device, nvme_directory: Path) -> None:
        self._device, self._directory = device, nvme_directory
        self._on_gpu: dict[Key, torch.Tensor] = {}
        self._left: dict[Key, Form] = {}  # boundaries that are not on the GPU
        self._host: dict[Key, torch.Tensor] = {}
        self._swapped: dict[Key, list[torch.Tensor]] = {}
        self._file: ScratchFile | None = None
        self._homes: Rooms[torch.Tensor] = Rooms(self._host_empty)
        self._internals_homes: Rooms[torch.Tensor] = Rooms(self._host_empty)
        self._offsets: Rooms[int] = Rooms(lambda size: self._nvme().reserve(size))
        self._ring: list[torch.Tensor] = []
        self._uses = 0

    def reserve(self, program: Program) -> None:
        """Make all room that a program needs beside what is taken. Raises OutOfMemory."""
        written = {(op.unit, op.micro): op.kind for op in program.ops if op.kind in ("write", "spill")}
        if written and self._file is None:
            direct = "spill" in written.values()
            self._file = GpuDirectFile(self._directory, self._device) if direct else NvmeFile(self._directory)
        staging = [b.bytes for b in program.buffers if b.name.startswith("nvme_staging.")]
        if staging and sum(buffer.numel() for buffer in self._ring) < sum(staging):
            self._ring = [self._host_empty(size) for size in staging]
        on_host = [op for op in program.ops if (op.unit, op.micro) not in written]
        self._homes.reserve(
            [op for op in on_host if op.kind != "reload" or self._is_on_host(op)], ("offload",), ("reload",)
        )
        self._offsets.reserve(program.ops, ("write", "spill"), ("read", "fetch"))
        self._internals_homes.reserve(program.ops, ("swap_out",), ("swap_in",))

    def _is_on_host(self, op: Op) -> bool:
        return (op.unit, op.micro) not in self._offsets.taken

    def _host_empty(self, size: int) -> torch.Tensor:
        return self._device.host_empty(size, torch.uint8)

    @property
    def host_bytes(self) -> int:
        """Host memory held for boundaries."""
        return sum(room.numel() for room in (*self._homes.all, *self._internals_homes.all, *self._ring))

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
        room = self._homes.take(key) if self._homes.has(key[0]) else self._next_staging()
        self._host[key] = target = form.front_of(room)
        return (lambda: self._device.copy(target, source)), source.nbytes

    def write(self, key: Key) -> Copy:
        """Write the staged boundary to NVMe."""
        file, staged, offset = self._nvme(), self._host.pop(key), self._offsets.take(key)
        return (lambda: file.write(offset, staged.view(-1))), staged.nbytes

    def read(self, key: Key) -> Copy:
        """Read the boundary from NVMe into a staging buffer."""
        if key not in self._left:
            return _NOTHING
        file, offset = self._nvme(), self._offsets.taken[key]
        self._host[key] = staged = self._left[key].front_of(self._next_staging())
        return (lambda: file.read(offset, staged.view(-1))), staged.nbytes

    def reload(self, key: Key) -> Copy:
        """Copy the boundary from the host back to newly taken GPU memory."""
        if key not in self._left:
            return _NOTHING
        source, form = self._host.pop(key), self._left.pop(key)
        self._homes.give_back(key)
        self._offsets.give_back(key)
        target = form.front_of(self._device.empty(form.bytes, torch.uint8))
        self._device.lend(target, "h2d")
        self._on_gpu[key] = target
        return (lambda: self._device.copy(target, source)), source.nbytes

    def spill(self, key: Key) -> Copy:
        """Write the boundary from the GPU to NVMe; the GPU's copy is given up."""
        source = self._on_gpu.pop(key)
        self._device.lend(source, "nvme_write")
        self._left[key] = Form(source.shape, source.dtype)
        file, offset = self._nvme(), self._offsets.take(key)
        return (lambda: file.write(offset, source)), source.nbytes

    def fetch(self, key: Key) -> Copy:
        """Read the boundary from NVMe to newly taken GPU memory."""
        if key not in self._left:
            return _NOTHING
        form, file, offset = self._left.pop(key), self._nvme(), self._offsets.taken[key]
        self._offsets.give_back(key)
        target = form.front_of(self._device.empty(form.bytes, torch.uint8))
        self._device.lend(target, "nvme_read")
        self._on_gpu[key] = target
        return (lambda: file.read(offset, target)), target.nbytes

    def swap_out(self, key: Key, kept: Internals) -> Copy:
        """Copy a layer's internals from the GPU to the host; the GPU's are given up."""
        sources = [whole(storage.memory) for storage in kept.storages if storage.memory is not None]
        for source, storage in zip(sources, kept.storages, strict=True):
            self._device.lend(source, "d2h")
            storage.memory = None
        sizes, room = [source.numel() for source in sources], self._internals_homes.take(key)
        if sum(map(padded, sizes)) > room.numel():
            raise ProgramError(
                f"unit {key[0]} keeps {sum(sizes):,} bytes of internals, the program has room for "
                f"{room.numel():,} on the host",
                hint="plan with internals: none for this model, or for the larger batch",
            )
        targets = self._swapped[key] = pack(room, sizes)
        return (lambda: self._device.copy_all(targets, sources)), sum(map(padded, sizes))

    def swap_in(self, key: Key, kept: Internals | None) -> Copy:
        """Copy a layer's internals back to newly taken GPU memory."""
        if kept is None or key not in self._swapped:
            return _NOTHING
        sources = self._swapped.pop(key)
        self._internals_homes.give_back(key)
        targets = [self._device.empty(source.numel(), torch.uint8) for source in sources]
        for target, storage in zip(targets, kept.storages, strict=True):
            self._device.lend(target, "h2d")
            storage.memory = target.untyped_storage()
        return (lambda: self._device.copy_all(targets, sources)), sum(padded(source.numel()) for source in sources)

    def spent_by(self, op: Op) -> list[torch.Tensor]:
        """The host memory that ``op``, which moves something back or on, is the last to read."""
        key = (op.unit, op.micro)
        if op.kind == "swap_in":
            return list(self._swapped.get(key, []))
        return [self._host[key]] if op.kind in ("write", "reload") and key in self._host else []

    def forget_read(self) -> None:
        """Boundaries that were read from NVMe ahead, and not brought to the GPU yet, will be read again."""
        for key in self._offsets.taken:
            self._host.pop(key, None)

    def forget(self, micro: int) -> None:
        """Give up all that is kept of one micro-batch."""
        for kept in (self._on_gpu, self._left, self._host, self._swapped):
            for key in [key for key in kept if key[1] == micro]:
                del kept[key]
        for rooms in (self._homes, self._internals_homes, self._offsets):
            for key in [key for key in rooms.taken if key[1] == micro]:
                rooms.give_back(key)

    def clear(self) -> None:
        """Give up everything that is kept (a step was given up)."""
        keys = (*self._on_gpu, *self._left, *self._host, *self._swapped, *self._homes.taken, *self._offsets.taken)
        for micro in {micro for _, micro in keys}:
            self.forget(micro)

    def close(self) -> None:
        """Give memory and disk space back."""
        self.clear()
        for rooms in (self._homes, self._internals_homes, self._offsets):
            rooms.close()
        self._ring.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _nvme(self) -> ScratchFile:
        assert self._file is not None, "only boundaries with a place on NVMe are written and read"
        return self._file

    def _next_staging(self) -> torch.Tensor:
        self._uses += 1
        return self._ring[self._uses % len(self._ring)]


class Rooms(Generic[Room]):
    """Each unit's rooms of one kind; a micro-batch takes the one that was given back last."""

    def __init__(self, make: Callable[[int], Room]) -> None:
        self.taken: dict[Key, Room] = {}
        self.all: list[Room] = []
        self._make = make
        self._free: dict[int, list[Room]] = defaultdict(list)

    def reserve(self, ops: Sequence[Op], taking: Sequence[Kind], giving_back: Sequence[Kind]) -> None:
        """Make the rooms for operations that take and give back, in this order."""
        free = {unit: len(rooms) for unit, rooms in self._free.items()}
        for op in ops:
            if op.kind in giving_back and op.unit in free:
                free[op.unit] += 1
            elif op.kind in taking:
                if not free.get(op.unit):
                    self.all.append(self._make(op.bytes))
                    self._free[op.unit].append(self.all[-1])
                    free[op.unit] = 1
                free[op.unit] -= 1

    def has(self, unit: int) -> bool:
        """Whether the unit has rooms."""
        return unit in self._free

    def take(self, key: Key) -> Room:
        self.taken[key] = self._free[key[0]].pop()
        return self.taken[key]

    def give_back(self, key: Key) -> None:
        """The room may be taken again; nothing happens if there was none."""
        if key in self.taken:
            self._free[key[0]].append(self.taken.pop(key))

    def close(self) -> None:
        for kept in (self.taken, self._free):
            kept.clear()
        self.all.clear()


def _nothing() -> None:
    """It is where it should be."""


_NOTHING: Copy = (_nothing, 0)


def pack(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Consecutive aligned parts of a byte buffer."""
    parts, start = [], 0
    with unseen():
        for size in sizes:
            parts.append(buffer[start : start + size])
            start += padded(size)
    return parts
