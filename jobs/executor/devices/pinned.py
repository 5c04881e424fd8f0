"""Pinned host memory of exactly the size asked for, and rings of slabs for what cannot be pinned."""

from __future__ import annotations

import logging
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from ...pinning import LARGEST_SLAB, SLABS, decide_pinning
from ...units import format_bytes
from .host import PAGE, page_aligned

log = logging.getLogger(__name__)

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Starts copying the second tensor to the first, in the order of the calling thread's stream."""


class Driver(Protocol):
    """What the GPU's driver does for host memory; numbers that are not 0 are its errors."""

    def register(self, address: int, nbytes: int) -> int: ...

    def unregister(self, address: int) -> int: ...

    def settle(self) -> None:
        """Wait for all copies, and clear the error that a refused registration leaves behind."""


class Mark(Protocol):
    """An event of the calling thread's stream."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class PinnedMemory:
    """Gives host memory and pins it, until the driver or ``limit_bytes`` refuses; `is_pinned` tells which is which."""

    def __init__(self, driver: Driver, *, node: int | None = None, limit_bytes: int | None = None) -> None:
        self._driver, self._node, self.limit_bytes = driver, node, limit_bytes
        self._lock = threading.RLock()  # memory may be freed by any thread, even inside `allocate`
        self._pinned: dict[int, int] = {}  # address to bytes, oldest first
        self._refused = False
        self.slab_bytes = LARGEST_SLAB
        """Size of a ring's slab; 0 where none can be pinned."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` (uint8) from a page's start, pinned if possible."""
        tensor = page_aligned(nbytes, self._node, self._forget)
        if nbytes and not self._refused and not self._pin(tensor.data_ptr(), _pages(nbytes)):
            self._make_room_for_rings(_pages(nbytes))
        return tensor

    def slab(self, nbytes: int) -> torch.Tensor:
        """As `allocate`, from the room that is kept for the rings."""
        tensor = page_aligned(nbytes, self._node, self._forget)
        self._pin(tensor.data_ptr(), _pages(nbytes))
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether all of a tensor's storage is pinned by this."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    @property
    def pinned_bytes(self) -> int:
        """Bytes pinned now."""
        return sum(self._pinned.values())

    def close(self) -> None:
        """Unpin everything; tensors keep their memory."""
        self._driver.settle()
        for address in list(self._pinned):
            self._forget(address)

    def _pin(self, address: int, nbytes: int) -> bool:
        over = self.limit_bytes is not None and self.pinned_bytes + nbytes > self.limit_bytes
        if over or self._driver.register(address, nbytes) != 0:
            return False
        self._pinned[address] = nbytes
        return True

    def _make_room_for_rings(self, refused_bytes: int) -> None:
        """Pinning has come to its end: give up the newest pins until the rings' slabs have room."""
        self._refused = True
        self._driver.settle()
        reached = self.pinned_bytes
        choice = decide_pinning(reached + refused_bytes, min(reached, self.limit_bytes or reached))
        self.slab_bytes = choice.slab_bytes
        while self._pinned and self.pinned_bytes > choice.in_place_bytes:
            self._forget(next(reversed(self._pinned)))
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        log.warning(
            "only %s of host memory can be pinned (ulimit -l: %s): other copies pass through %s. Raise the limit "
            "(ulimit -l unlimited; docker run --ulimit memlock=-1) for faster ones",
            format_bytes(reached),
            "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft),
            f"{choice.slabs} slabs of {format_bytes(choice.slab_bytes)} each way" if choice.slabs else "the driver",
        )

    def _forget(self, address: int) -> None:
        with self._lock:
            if self._pinned.pop(address, None) is not None:
                self._driver.unregister(address)


class SlabRing:
    """Copies between memory that is not pinned and the GPU, in parts, through pinned slabs; one thread uses it."""

    def __init__(self, slabs: list[torch.Tensor], copy: Copy, mark: Callable[[], Mark]) -> None:
        self._slabs, self._copy, self._mark = slabs, copy, mark
        self._marks: list[Mark | None] = [None] * len(slabs)
        self._uses = 0

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Fill a contiguous tensor on the device; the last parts may still be on their way at return."""
        for there, here in self._parts(target, source):
            slot, slab = self._next(here)
            slab.copy_(here)
            self._copy(there, slab)
            self._leave(slot)

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Fill a contiguous tensor on the host, whose dtype may be another; complete at return."""
        flying: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        for here, there in self._parts(target, source):
            if len(flying) == len(self._slabs):
                self._land(*flying.popleft())
            slot, slab = self._next(there)
            self._copy(slab, there)
            self._leave(slot)
            flying.append((slot, slab, here))
        while flying:
            self._land(*flying.popleft())

    def _parts(self, target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        target, source = target.view(-1), source.reshape(-1)
        length = self._slabs[0].nbytes // source.element_size()
        return zip(target.split(length), source.split(length), strict=True)

    def _next(self, like: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The next slab, empty, as a tensor of the same dtype and length as ``like``."""
        self._uses += 1
        slot = self._uses % len(self._slabs)
        if (mark := self._marks[slot]) is not None:
            mark.synchronize()
        return slot, self._slabs[slot][: like.nbytes].view(like.dtype)

    def _leave(self, slot: int) -> None:
        mark = self._marks[slot] = self._mark()
        mark.record()

    def _land(self, slot: int, slab: torch.Tensor, here: torch.Tensor) -> None:
        mark = self._marks[slot]
        assert mark is not None
        mark.synchronize()
        here.copy_(slab)


def make_ring(memory: PinnedMemory, copy: Copy, mark: Callable[[], Mark]) -> SlabRing | None:
    """A ring of one direction; None where no slab can be pinned."""
    if memory.slab_bytes == 0:
        return None
    slabs = [memory.slab(memory.slab_bytes) for _ in range(SLABS)]
    return SlabRing(slabs, copy, mark) if all(memory.is_pinned(slab) for slab in slabs) else None


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
