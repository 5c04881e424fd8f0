"""What operations on NVMe homes of optimizer state and gradients do; `policy.parked` has their place in the program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ..policy import Op, Program
from .devices import Device
from .stores import HostUnit
from .stores.nvme import NvmeFile
from .stores.parked import ParkedOptimizer, Ring

Transfer = tuple[Callable[[], None], int]
KINDS = frozenset({"read_state", "write_state", "read_gradient", "write_gradient"})


class Parking:
    """The rings and the gradients' file of one program."""

    def __init__(
        self, program: Program, units: Sequence[HostUnit], owner: Sequence[int], device: Device, directory: Path
    ) -> None:
        """Raises OutOfMemory when the disk or the host has no room."""
        self._units, self._owner = units, owner
        self._states, self._gradients = (_ring(program, device, what) for what in ("state", "gradient"))
        contributions = Counter(owner[op.unit] for op in program.ops if op.kind == "gradient")
        sizes = {owner[op.unit]: op.bytes for op in program.ops if op.kind == "write_gradient"}
        self._dtypes = {u: torch.float32 if contributions[u] > 1 else units[u].dtype for u in sizes}
        self._file = NvmeFile(directory) if sizes else None
        self._offsets = {unit: self._open().reserve(size) for unit, size in sizes.items()}

    def holds_gradient_of(self, unit: int) -> bool:
        """Whether this master's gradient is on NVMe."""
        return unit in self._offsets

    def place_gradient(self, unit: int) -> None:
        """Give the master a buffer of the ring for a gradient that is about to arrive."""
        host, dtype = self._units[unit], self._dtypes[unit]
        host.gradient = self._gradients.take(unit, host.learning.numel * dtype.itemsize).view(dtype)

    def gradient_of(self, unit: int) -> torch.Tensor:
        """A copy of a gradient that was written, flat."""
        gradient = torch.empty(self._units[unit].learning.numel, dtype=self._dtypes[unit])
        self._open().read(self._offsets[unit], gradient)
        return gradient

    def prepare(self, op: Op) -> Transfer:
        """The work of an operation whose kind is in ``KINDS``."""
        transfer: Transfer = getattr(self, f"_{op.kind}")(op)
        return transfer

    def update(self, unit: int, update: Callable[[], None]) -> Callable[[], None]:
        """Do ``update`` with the unit's state in the buffer that it was read into."""
        weights = self._units[unit].weights
        if not isinstance(weights, ParkedOptimizer):
            return update
        buffer = self._states.of(unit)

        def work() -> None:
            with weights.here(buffer):
                update()

        return work

    @property
    def host_bytes(self) -> int:
        """Host memory of the rings."""
        return self._states.bytes + self._gradients.bytes

    def close(self) -> None:
        """Give memory and disk space back."""
        for ring in (self._states, self._gradients):
            ring.buffers.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read_state(self, op: Op) -> Transfer:
        weights, buffer = self._parked(op.unit), self._states.take(op.unit, op.bytes)
        return lambda: weights.read(buffer), op.bytes

    def _write_state(self, op: Op) -> Transfer:
        weights, buffer = self._parked(op.unit), self._states.of(op.unit)
        return lambda: weights.write(buffer), op.bytes

    def _read_gradient(self, op: Op) -> Transfer:
        unit, file = self._owner[op.unit], self._open()
        self.place_gradient(unit)
        gradient, offset = self._gradient(unit), self._offsets[unit]
        return lambda: file.read(offset, gradient), gradient.nbytes

    def _write_gradient(self, op: Op) -> Transfer:
        unit, file = self._owner[op.unit], self._open()
        gradient, offset = self._gradient(unit), self._offsets[unit]
        return lambda: file.write(offset, gradient), gradient.nbytes

    def _gradient(self, unit: int) -> torch.Tensor:
        gradient = self._units[unit].gradient
        assert gradient is not None
        return gradient

    def _parked(self, unit: int) -> ParkedOptimizer:
        weights = self._units[unit].weights
        assert isinstance(weights, ParkedOptimizer), "the policy parks the state of this unit"
        return weights

    def _open(self) -> NvmeFile:
        assert self._file is not None, "only gradients with a place on NVMe are written and read"
        return self._file


def _ring(program: Program, device: Device, what: str) -> Ring:
    held = [buffer for buffer in program.buffers if buffer.name.startswith(f"{what}_ring.")]
    return Ring([device.host_empty(buffer.bytes, torch.uint8) for buffer in held])


def parked_state_bytes(units: Sequence[HostUnit]) -> Mapping[int, int]:
    """True bytes of each unit's state on NVMe, for lowering."""
    return {i: unit.weights.parked_bytes for i, unit in enumerate(units) if isinstance(unit.weights, ParkedOptimizer)}
