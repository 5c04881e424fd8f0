"""The step program: the ordered operations of one optimizer step, and the memory they hold.

Operations stand in the order in which they are issued. Each runs on one stream; a stream runs its operations in that
order, and an operation starts when its stream is free and everything in ``after`` has ended. So the list is all that
the executor needs to run a step, the simulator to price it and the dashboard to draw it.

Example (4 layers, two weight slots, boundary 1 on the host, 2 recomputed, 3 on the GPU; micro-batch 0):

    cpu       update.0 ...  (the gradients of the step before, in forward order)        norm.3 ... norm.0  clip
    h2d       load.0 load.1 load.2 load.3 load.1.r   | reload.1    load.2.b     load.0.b
    compute   forward.0 forward.1 ... forward.3 loss | backward.3  recompute.1  backward.2 backward.1 backward.0
    d2h                 offload.1                    |             gradient.3   ...        gradient.1 gradient.0

Layer 3 is not loaded again for its backward: its slot still holds it. Nor is layer 1, after its recompute.

Memory is part of the program: a `Buffer` says which operation acquires it and which release it. An operation that needs
room waits, through ``after``, for the one that frees it, so the peak holds whatever the speed of any link.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from ..model_facts import Internals
from .order import Order

Kind = Literal[
    "update", "load", "forward", "offload", "write", "spill", "swap_out", "loss", "read", "reload", "fetch", "swap_in",
    "recompute", "backward", "gradient", "accumulate", "norm", "clip",
    "read_state", "write_state", "read_gradient", "write_gradient",
]  # fmt: skip
UPDATE_PHASE: Final[frozenset[Kind]] = frozenset({"update", "read_state", "write_state", "read_gradient"})
"""Kinds of the first operations of a training program: they apply the gradients of the step before."""
DIRECT: Final[frozenset[Kind]] = frozenset({"spill", "fetch"})
"""Kinds that move a boundary between GPU memory and NVMe with no stop on the host (GPUDirect Storage)."""
Stream = Literal["compute", "h2d", "d2h", "nvme_read", "nvme_write", "cpu"]
Tier = Literal["gpu", "host", "nvme"]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of the step."""

    id: str
    kind: Kind
    stream: Stream
    unit: int
    """Index into ``facts.units``; -1 for operations of the whole model."""
    micro: int = 0
    bytes: int = 0
    """Bytes that cross the stream's link; for ``update`` and ``norm``, bytes of the gradient they read."""
    after: tuple[str, ...] = ()
    slot: int = -1
    """Slot of a layer's weights (the ring's first, then those of resident layers); -1 for a buffer of its own."""
    workspace_bytes: int = 0
    """GPU memory a compute operation needs while it runs, beyond every `Buffer`; negative where the buffers that it
    fills and empties are never full at once."""
    internals: Internals = "none"
    """What a layer's forward keeps for its backward, so that backward need not compute it again."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory held from the start of ``acquired_by`` ("" = the start of the step) until all of ``released_by`` ended."""

    name: str
    tier: Tier
    bytes: int
    acquired_by: str = ""
    released_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """The operations of one step and the memory they use."""

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    order: Order = ()
    whole: bool = True
    """Whether this is a whole step, or one phase of a step that found its order while it ran."""
    promised: tuple[tuple[int, int], ...] = ()
    """`moments` as they were when the program was made, for `hazards.check`."""

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each operation."""
        return {op.id: i for i, op in enumerate(self.ops)}

    @cached_property
    def driven(self) -> tuple[int, ...]:
        """For each position, that of the first operation from there on that the model drives; -1 if there is none."""
        found, following = [-1], -1
        for i in range(len(self.ops) - 1, -1, -1):
            if self.ops[i].stream == "compute" and self.ops[i].kind != "recompute":
                following = i
            found.append(following)
        return tuple(reversed(found))

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each operation, the bit set of the positions of all that must have ended before it starts."""
        sets: list[int] = []
        last: dict[str, int] = {}
        for i, op in enumerate(self.ops):
            before = [self.index[name] for name in op.after]
            if op.stream in last:
                before.append(last[op.stream])
            bits = 0
            for j in before:
                bits |= sets[j] | (1 << j)
            sets.append(bits)
            last[op.stream] = i
        return tuple(sets)

    def bytes_by_stream(self) -> dict[str, int]:
        """Bytes each link moves in one step."""
        total: dict[str, int] = defaultdict(int)
        for op in self.ops:
            if op.stream not in ("compute", "cpu"):
                total[op.stream] += op.bytes
        return dict(total)

    def peak_bytes(self, tier: Tier) -> int:
        """Upper bound of the tier's use at any moment (see `moments`), for any durations of the operations."""
        change = [0] * (2 * len(self._compute) + 2)
        for buffer, (first, gone) in zip(self.buffers, self.moments, strict=True):
            if buffer.tier == tier:
                change[first] += buffer.bytes
                change[gone] -= buffer.bytes
        held = list(itertools.accumulate(change))
        if tier == "gpu":
            for i, position in enumerate(self._compute):
                held[2 * i + 1] += self.ops[position].workspace_bytes
        return max(*held, 0)

    @cached_property
    def moments(self) -> tuple[tuple[int, int], ...]:
        """For each buffer, the first moment at which it may be held, and the first at which it is gone for certain.

        Moment 2k + 1 is during compute operation k, moment 2k is before it, after the one before. A buffer may be held
        unless the dependencies force it to be acquired only later, or to be released by then.
        """
        return tuple((self._first_moment(buffer), self._moment_gone(buffer)) for buffer in self.buffers)

    @cached_property
    def _compute(self) -> list[int]:
        return [position for position, op in enumerate(self.ops) if op.stream == "compute"]

    def _first_moment(self, buffer: Buffer) -> int:
        if not buffer.acquired_by:
            return 0
        position = self.index[buffer.acquired_by]
        ended = bisect.bisect_left(self._compute, True, key=lambda k: not (self.ancestors[position] >> k) & 1)
        return 2 * ended + (self.ops[position].stream == "compute")

    def _moment_gone(self, buffer: Buffer) -> int:
        end = 2 * len(self._compute) + 1
        if not buffer.released_by:
            return end
        released = 0
        for name in buffer.released_by:
            released |= 1 << self.index[name]
        k = bisect.bisect_left(self._compute, True, key=lambda i: self.ancestors[i] & released == released)
        if k and (self.ancestors[self._compute[k - 1]] | (1 << self._compute[k - 1])) & released == released:
            return 2 * k
        return min(2 * k + 1, end)


def unit_labels(kinds: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Short name of each unit: the number of a layer, the last part of the path of any other (all of it if need be)."""
    layers = iter(range(len(kinds)))
    others = Counter(name.rsplit(".", 1)[-1] for kind, name in zip(kinds, names, strict=True) if kind != "layer")
    return tuple(
        str(next(layers)) if kind == "layer" else name if others[last] > 1 or last.isdigit() else last
        for kind, name in zip(kinds, names, strict=True)
        for last in (name.rsplit(".", 1)[-1],)
    )
