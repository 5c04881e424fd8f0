"""Buffers that a unit's forward changes: a second run must find them as the first did, and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from ..errors import ProgramError

LARGEST = 2**20
"""Bytes of a buffer that may be changed: its value before is kept on the device until the unit's backward."""


class Before(NamedTuple):
    """A buffer's place, and what was there before a run."""

    held: dict[str, torch.Tensor | None]
    name: str
    buffer: torch.Tensor
    version: int
    value: torch.Tensor | None
    """A copy; None where no run has changed the buffer so far."""

    @property
    def has_changed(self) -> bool:
        return self.held[self.name] is not self.buffer or self.buffer._version != self.version

    def put_back(self) -> None:
        """Let the buffer be what it was before the run."""
        assert self.value is not None
        self.buffer.copy_(self.value)
        self.held[self.name] = self.buffer


class Buffers:
    """The buffers of one module and of those inside it.

    The first run shows which of them change; only these are copied from then on.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (inner._buffers, name)
            for inner in module.modules()
            for name, buffer in inner._buffers.items()
            if buffer is not None
        ]
        self._changing: set[int] | None = None

    def before(self) -> list[Before]:
        """Remember them, before a run."""
        found = []
        for place, (held, name) in enumerate(self._places):
            buffer = held[name]
            assert buffer is not None
            watched = place in self._changing if self._changing is not None else buffer.nbytes <= LARGEST
            value = buffer.detach().clone() if watched else None
            found.append(Before(held, name, buffer, buffer._version, value))
        return found

    def changed(self, before: Sequence[Before]) -> list[Before]:
        """Those that the run has changed. Raises ProgramError for one whose value before is lost."""
        changed = {place for place, known in enumerate(before) if known.has_changed}
        self._changing = changed | (self._changing or set())
        lost = [before[place] for place in sorted(changed) if before[place].value is None]
        if lost:
            large = lost[0].buffer.nbytes > LARGEST
            raise ProgramError(
                f"a forward changes the buffer {lost[0].name} of {lost[0].buffer.nbytes:,} bytes, whose value before "
                "was not kept, so that it cannot run again for its gradient",
                hint="this architecture cannot be streamed" if large else "run this step again: it will be kept",
            )
        return [before[place] for place in sorted(changed)]


@contextmanager
def as_before(changed: Sequence[Before]) -> Iterator[None]:
    """While entered, the buffers are copies of what they were; afterwards they are what they have become."""
    now = [known.held[known.name] for known in changed]
    for known in changed:
        assert known.value is not None
        known.held[known.name] = known.value.clone()
    try:
        yield
    finally:
        for known, buffer in zip(changed, now, strict=True):
            known.held[known.name] = buffer
