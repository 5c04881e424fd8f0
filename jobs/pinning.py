"""How much host memory is pinned, and what passes through a ring of pinned slabs because it cannot be.

Copies between host and GPU run beside other work only from pinned (page-locked) memory. Some systems allow little of
it: containers with a memory-lock limit, WSL, a driver that is out of mappings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SLABS: Final = 3
"""Slabs of each direction: one being filled, one being emptied, one in between."""
LARGEST_SLAB: Final = 32 * 2**20
SMALLEST_SLAB: Final = 2**20
"""Below this, a copy's fixed cost is more than that of its bytes."""
_DIRECTIONS: Final = 2


@dataclass(frozen=True, slots=True)
class Pinning:
    """What is pinned."""

    in_place_bytes: int
    """Buffers that are pinned themselves."""
    slabs: int = 0
    """Slabs of each direction; 0 where no ring is needed, or none is possible."""
    slab_bytes: int = 0

    @property
    def ring_bytes(self) -> int:
        """Host memory of both rings, beside all other buffers."""
        return _DIRECTIONS * self.slabs * self.slab_bytes


def decide_pinning(wanted_bytes: int, limit_bytes: int | None) -> Pinning:
    """All in place where the limit (None: there is none) allows it; else two rings, and in place what is left of it.

    The rings take at most half of the limit. Where even the smallest do not fit, nothing is pinned, and the driver
    copies through memory of its own.
    """
    if limit_bytes is None or wanted_bytes <= limit_bytes:
        return Pinning(wanted_bytes)
    slab = LARGEST_SLAB
    while slab >= SMALLEST_SLAB:
        ring = _DIRECTIONS * SLABS * slab
        if 2 * ring <= limit_bytes:
            return Pinning(limit_bytes - ring, SLABS, slab)
        slab //= 2
    return Pinning(0)
