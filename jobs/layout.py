"""Where each parameter of a unit lies in the unit's one flat buffer (on the host, on the link and in its GPU slot)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = 64
"""Elements; a bf16 parameter then starts at a multiple of 128 bytes, as GPU kernels like it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter: ``numel`` elements from ``offset``."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def end(self) -> int:
        """Where the next parameter starts: after this one and its padding."""
        return self.offset + -(-self.numel // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Layout:
    """All parameters of a unit; elements between segments are padding and stay zero."""

    segments: tuple[Segment, ...]
    numel: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """Lay the parameters out in the given order, each at the next aligned offset."""
        segments, offset = [], 0
        for name, shape in shapes.items():
            segments.append(Segment(name, tuple(shape), offset, math.prod(shape)))
            offset = segments[-1].end
        return cls(tuple(segments), offset)


def flat_bytes(parameters: Sequence[torch.Tensor]) -> int:
    """Bytes of the flat buffer of parameters of one dtype."""
    layout = Layout.of({str(i): tuple(p.shape) for i, p in enumerate(parameters)})
    return layout.numel * (parameters[0].element_size() if parameters else 0)
