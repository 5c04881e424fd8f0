"""Optimizer state that lies on NVMe and is on the host only while it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from ...replay import padded
from ..devices.host import page_aligned
from .scratch import ScratchFile

_PIECE_BYTES = 1 << 24


class MovableOptimizer(Protocol):
    """A unit's optimizer whose state beside the streamed weights may lie anywhere (`jobs.optim` has it)."""

    streamed: torch.Tensor

    def update(self, gradient: torch.Tensor, *, step: int, scale: float, lr: float) -> None: ...

    def master(self) -> torch.Tensor: ...

    def load_master(self, weights: torch.Tensor, offset: int = 0) -> None: ...

    def state(self) -> Mapping[str, torch.Tensor]: ...

    def state_beside_streamed(self) -> Mapping[str, torch.Tensor]: ...

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None: ...

    def kept(self) -> dict[str, torch.Tensor]:
        """All flat tensors that an update needs beside the streamed weights."""

    def keep_in(self, places: Mapping[str, torch.Tensor]) -> None:
        """Use these tensors instead, of the same names, dtypes and sizes; nothing is copied."""


class ParkedOptimizer:
    """One unit's optimizer with its state in a file.

    Updates find the state in the buffer that `here` was given, which `read` fills and `write` saves. Everything else
    brings the state to the host for as long as it takes, and must not run while an update of this unit is under way.
    """

    def __init__(self, inner: MovableOptimizer, file: ScratchFile) -> None:
        """Move the state of ``inner`` to ``file``. Raises OutOfMemory when the disk has no room."""
        kept = inner.kept()
        self._inner, self._file = inner, file
        self._forms = {name: (tensor.dtype, tensor.nbytes) for name, tensor in kept.items()}
        self.parked_bytes = sum(padded(nbytes) for _, nbytes in self._forms.values())
        """Bytes on NVMe."""
        self._offset = file.reserve(self.parked_bytes)
        self._move(kept)
        self._leave()

    @property
    def streamed(self) -> torch.Tensor:
        """The weights that cross the link: they stay on the host."""
        return self._inner.streamed

    @streamed.setter
    def streamed(self, tensor: torch.Tensor) -> None:
        self._inner.streamed = tensor

    def read(self, buffer: torch.Tensor) -> None:
        """Fill a byte buffer with the state."""
        self._file.read(self._offset, buffer[: self.parked_bytes])

    def write(self, buffer: torch.Tensor) -> None:
        """Save the state that a byte buffer holds."""
        self._file.write(self._offset, buffer[: self.parked_bytes])

    @contextmanager
    def here(self, buffer: torch.Tensor) -> Iterator[None]:
        """Let the optimizer work on the state in ``buffer``."""
        self._inner.keep_in(self._places(buffer))
        self._away = False
        try:
            yield
        finally:
            self._leave()

    def update(self, gradient: torch.Tensor, *, step: int, scale: float, lr: float) -> None:
        """Apply ``scale`` x ``gradient``; only inside `here`."""
        assert not self._away, "an update works on a state that is on the host"
        self._inner.update(gradient, step=step, scale=scale, lr=lr)

    def master(self) -> torch.Tensor:
        """Flat float32 weights, exact."""
        with self._brought():
            return self._inner.master().clone()

    def state(self) -> Mapping[str, torch.Tensor]:
        """All that is needed to go on; the tensors take host memory for as long as somebody holds them.

        It may be read while an update of this unit waits for its turn, and has its own copy of the state already.
        """
        return {**self._inner.state(), **self._copy()}

    def state_beside_streamed(self) -> Mapping[str, torch.Tensor]:
        """``state()`` without the streamed weights."""
        return {**self._inner.state_beside_streamed(), **self._copy()}

    def load_master(self, weights: torch.Tensor, offset: int = 0) -> None:
        """Take these weights, flat, from element ``offset`` on; optimizer states stay as they are."""
        with self._brought() as buffer:
            self._inner.load_master(weights, offset)
            self.write(buffer)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up a saved state. Raises CheckpointError if it is not of this unit."""
        with self._brought() as buffer:
            self._inner.load_state(state)
            self.write(buffer)

    @contextmanager
    def _brought(self) -> Iterator[torch.Tensor]:
        buffer = page_aligned(self.parked_bytes)
        self.read(buffer)
        with self.here(buffer):
            yield buffer

    def _copy(self) -> dict[str, torch.Tensor]:
        buffer = page_aligned(self.parked_bytes)
        self.read(buffer)
        return self._places(buffer)

    def _move(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Write the state piece by piece, from memory that direct I/O can read: no second copy of it is made."""
        piece = page_aligned(min(_PIECE_BYTES, self.parked_bytes))
        for at in range(0, self.parked_bytes, _PIECE_BYTES):
            part, start = piece[: self.parked_bytes - at], -at
            for tensor in kept.values():
                first, last = max(0, start), min(part.numel(), start + tensor.nbytes)
                if first < last:
                    part[first:last] = tensor.view(torch.uint8)[first - start : last - start]
                start += padded(tensor.nbytes)
            self._file.write(self._offset + at, part)

    def _leave(self) -> None:
        self._inner.keep_in({name: torch.empty(0, dtype=dtype) for name, (dtype, _) in self._forms.items()})
        self._away = True

    def _places(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        places, start = {}, 0
        for name, (dtype, nbytes) in self._forms.items():
            places[name] = buffer[start : start + nbytes].view(dtype)
            start += padded(nbytes)
        return places


class Ring:
    """Host buffers used in turn, by one unit at a time each; the program says when a buffer is free again."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.buffers = list(buffers)
        self._uses = 0
        self._held: dict[int, torch.Tensor] = {}

    def take(self, unit: int, nbytes: int) -> torch.Tensor:
        """The next buffer's front, for ``unit`` from now on."""
        self._uses += 1
        self._held[unit] = self.buffers[self._uses % len(self.buffers)][:nbytes]
        return self._held[unit]

    def of(self, unit: int) -> torch.Tensor:
        """What the unit took last."""
        return self._held[unit]

    @property
    def bytes(self) -> int:
        """Host memory of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)
