"""How a unit's parameters are cut: which keep 8-bit states, which decay, and the chunks in which they are worked on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..layout import Layout, Segment

CHUNK = 1 << 18
"""Elements worked on at once: temporaries stay near 10 MB, and calls are long against what a call costs (measured)."""


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter of a unit, or a share of one, and where its states lie in the unit's state buffers."""

    segment: Segment
    start: int
    """First element, within the segment."""
    numel: int
    quantised: bool
    decayed: bool
    state_offset: int
    """In elements, of the 8-bit or of the fp32 buffers."""
    scale_offset: int
    """In blocks; 0 when the states are fp32."""

    @property
    def offset(self) -> int:
        """First element, within the unit."""
        return self.segment.offset + self.start


def is_quantised(shape: tuple[int, ...], numel: int, *, state_bits: int, min_8bit_size: int) -> bool:
    """Whether a parameter keeps 8-bit states: not when it is small, nor a norm or a bias (one dimension or none)."""
    return state_bits == 8 and len(shape) >= 2 and numel >= min_8bit_size


def cut(
    layout: Layout,
    *,
    state_bits: int,
    block_size: int,
    min_8bit_size: int,
    eight_bit_fraction: float = 1.0,
    decay_all: bool = False,
    fp32_states: Sequence[str] = (),
    no_decay: Sequence[str] = (),
    path: str = "",
) -> tuple[Part, ...]:
    """The parts of a unit, in layout order; without ``decay_all`` only tensors of two or more dimensions decay.

    Of a parameter that qualifies for 8 bits, at most ``eight_bit_fraction`` gets them: its first whole blocks. A name,
    ``path`` before it, that fits one of the patterns of ``fp32_states`` gets none; one of ``no_decay`` no decay.
    """
    parts = []
    offsets = {True: 0, False: 0}
    scales = 0
    for segment in layout.segments:
        name = f"{path}.{segment.name}" if path else segment.name
        decayed = (decay_all or len(segment.shape) >= 2) and not _fits(name, no_decay)
        quantised = is_quantised(segment.shape, segment.numel, state_bits=state_bits, min_8bit_size=min_8bit_size)
        quantised = quantised and not _fits(name, fp32_states)
        small = share(segment.numel, block_size, eight_bit_fraction) if quantised else 0
        shares = ((0, small, True), (small, segment.numel - small, False))
        for start, numel, quantised in (s for s in shares if s[1]):
            offset = offsets[quantised]
            parts.append(Part(segment, start, numel, quantised, decayed, offset, scales if quantised else 0))
            offsets[quantised] += numel
            scales += blocks(numel, block_size) if quantised else 0
    return tuple(parts)


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def share(numel: int, block_size: int, fraction: float) -> int:
    """Elements of at most ``fraction`` of ``numel``, in whole blocks unless it is all of them."""
    return numel if fraction >= 1 else int(numel * fraction) // block_size * block_size


def blocks(numel: int, block_size: int) -> int:
    """Blocks of a parameter of ``numel`` elements; the last may be short."""
    return -(-numel // block_size)


def chunks(numel: int, block_size: int, limit: int = CHUNK) -> Iterator[tuple[int, int]]:
    """Half-open ranges that cover ``numel`` elements once, in order.

    Each holds whole blocks and at most ``limit`` elements (one block when that is larger); a short last block comes
    alone.
    """
    whole = numel - numel % block_size
    stride = max(limit - limit % block_size, block_size)
    for start in range(0, whole, stride):
        yield start, min(start + stride, whole)
    if whole < numel:
        yield whole, numel
