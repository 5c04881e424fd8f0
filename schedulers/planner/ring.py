"""Which weights are still on the GPU when backward needs them, and what each load waits for.

The ring of weight slots gives up the layer used longest ago. What is in it when a block begins does not depend on how
earlier blocks were cut: every layer above the block was used for the last time by its backward, in falling order, and
below them stand the last layers of the forward pass. So each block can be looked at on its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple


class Use(NamedTuple):
    """A use of a layer: by its forward, its backward, or a recompute of the block at hand."""

    kind: Literal["forward", "backward", "recompute"]
    layer: int


@dataclass(frozen=True, slots=True)
class Access:
    """A use of a layer within a block: whether its weights must be loaded, and after which earlier use (None: any)."""

    use: Use
    loads: bool
    after: Use | None


@dataclass(frozen=True)
class Ring:
    """The ring of a program with ``slots`` weight slots whose ``resident`` layers have slots of their own."""

    layers: int
    slots: int
    resident: frozenset[int]

    @cached_property
    def in_ring(self) -> tuple[int, ...]:
        """Layers that go through the ring."""
        return tuple(layer for layer in range(self.layers) if layer not in self.resident)

    def forward_after(self, layer: int) -> int | None:
        """The layer whose forward must have ended before this one is loaded for its forward; None for residents."""
        if layer in self.resident:
            return None
        before = bisect_left(self.in_ring, layer)
        return self.in_ring[before - self.slots] if before >= self.slots else None

    def stays_from_backward(self, layer: int) -> bool:
        """Whether the next micro-batch finds the layer still there."""
        return layer in self.resident or layer in self.in_ring[: self.slots]

    def held(self, end: int) -> list[Use | None]:
        """The ring before the block that ends at boundary ``end``, oldest use first."""
        return self._recent(end, self.in_ring)

    def oldest_of_all(self, end: int) -> Use | None:
        """As the first of `held`, were no layer resident: what the transfers of a block's first layer wait for."""
        return self._recent(end, range(self.layers))[0]

    def _recent(self, end: int, layers: Sequence[int]) -> list[Use | None]:
        """The last uses of ``layers``, which are in order, before a block that ends at ``end``: as many as are held."""
        first, slots = bisect_left(layers, end), self.slots
        uses: list[Use | None] = [Use("backward", layer) for layer in layers[first : first + slots]]
        uses += [Use("forward", layer) for layer in reversed(layers[max(0, first - slots) : first])]
        uses = (uses + [None] * slots)[:slots]
        return uses[::-1]

    def block(self, start: int, end: int) -> list[Access]:
        """The uses of a block's layers in order: recomputes from ``start`` up, then backwards from ``end - 1`` down."""
        held = self.held(end)
        uses = [Use("recompute", layer) for layer in range(start, end - 1)]
        uses += [Use("backward", layer) for layer in range(end - 1, start - 1, -1)]
        accesses = []
        for use in uses:
            if use.layer in self.resident:
                accesses.append(Access(use, False, held[0]))
                continue
            found = [i for i, other in enumerate(held) if other is not None and other.layer == use.layer]
            accesses.append(Access(use, not found, held[0]))
            del held[found[0] if found else 0]
            held.append(use)
        return accesses
