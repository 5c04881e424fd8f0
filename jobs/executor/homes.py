"""Where the values of a streamed model's parameters are between their uses, and who is told when they change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

from ..errors import ProgramError
from ..layout import Segment
from .stores import HostUnit

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
"""The dtypes in which weights stream, and integers of the same bits."""


@dataclass(frozen=True)
class Keeper:
    """What the parameters of one streamed model have in common."""

    device: torch.device
    flush: Callable[[], None]
    """Returns when no update of the weights is under way."""
    change: Callable[[], None]
    """Comes before somebody writes weights."""
    has_gradients: Callable[[], bool]
    """Whether a step is under way whose gradients exist, and are not shown to a trainer."""


@dataclass(frozen=True, eq=False)
class Home:
    """Where the values of one parameter are."""

    name: str
    unit: HostUnit
    segment: Segment
    keeper: Keeper

    @property
    def seen(self) -> torch.Tensor:
        """The values on the host, in the dtype that streams; they may be in the middle of an update."""
        return self.part(0, self.segment.numel).view(self.segment.shape)

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of the flat values."""
        return self.unit.weights.streamed[self.segment.offset + start : self.segment.offset + stop]

    def write(self, values: torch.Tensor, start: int) -> None:
        """Take these values, flat, from element ``start`` on; those that are as they were keep what lies below them."""
        self.keeper.change()
        first, bits = self.segment.offset + start, BITS[values.dtype]
        new, before = values.detach().cpu(), self.part(start, start + values.numel())
        master = self.unit.weights.master()[first : first + values.numel()]
        changed = new.view(bits) != before.view(bits)
        self.unit.weights.load_master(torch.where(changed, new.float(), master), first)


@dataclass(frozen=True)
class Window:
    """A parameter at rest, or a view of one: what of its values it shows."""

    home: Home
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    learns: bool
    """Whether what is computed from it would have a gradient."""

    @property
    def stop(self) -> int:
        """Behind the last element that it shows."""
        if 0 in self.size:
            return self.offset
        return self.offset + 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))


def refuse(name: str, what: str, hint: str) -> NoReturn:
    """Raise ProgramError for what a parameter of a streamed model cannot."""
    raise ProgramError(f"{name} is a parameter of a streamed model, which cannot {what}", hint=hint)
