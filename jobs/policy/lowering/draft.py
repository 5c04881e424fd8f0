"""A program while it is made: its compute operations, and what is issued before each of them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ...model_facts import Internals, ModelFacts
from ..artifact import Home, Policy
from ..order import Order, Phase
from ..parked import Parked
from ..program import Buffer, Kind, Op, Stream, Tier, unit_labels
from .sequence import ComputeKind, compute_order


@dataclass(slots=True)
class Compute:
    """A compute operation whose transfers are still being placed."""

    kind: ComputeKind
    unit: int
    micro: int
    id: str
    after: list[str] = field(default_factory=list)
    slot: int = -1


class Draft:
    """What is known of the program so far. Positions are those of compute operations in their order."""

    def __init__(self, policy: Policy, facts: ModelFacts, parked: Parked, order: Order) -> None:
        self.policy, self.facts, self.units, self.parked, self.order = policy, facts, facts.units, parked, order
        self.labels = unit_labels(tuple(u.kind for u in self.units), tuple(u.name for u in self.units))
        self.first, self.layers, self.head = len(facts.before), len(facts.layers), len(self.units) - 1
        by_name = {unit.name: i for i, unit in enumerate(self.units)}
        self.owner = [by_name.get(unit.shares_weights_with, i) for i, unit in enumerate(self.units)]
        self.learning = [u for u, unit in enumerate(self.units) if self.owner[u] == u and unit.gradient_bytes]
        self.computes = [Compute(*run, id=self.id(*run)) for run in compute_order(policy, facts, order)]
        self.position = {compute.id: i for i, compute in enumerate(self.computes)}
        self.placed_at: dict[str, int] = {}
        """Before which position each transfer is issued."""
        self.buffers: list[Buffer] = []
        self._homes, self._boundary_bytes = policy.homes, facts.boundary_bytes  # each is made when it is asked for
        self._early: dict[int, list[Op]] = defaultdict(list)  # by position
        self._last_arrival = 0

    # ---- what the operations are

    def id(self, kind: str, unit: int, micro: int) -> str:
        """The name of an operation of one unit and micro-batch."""
        return f"{kind}.{self.labels[unit]}@{micro}"

    def home(self, unit: int) -> Home | None:
        """Home of a layer's input; None for units that are not layers."""
        layer = unit - self.first
        return self._homes[layer] if 0 <= layer < self.layers else None

    def leaves_by(self, unit: int) -> Literal["offload", "spill"]:
        """The kind of operation that takes a layer's input from the GPU, if its home is elsewhere."""
        return "spill" if self.policy.direct_nvme and self.home(unit) == "nvme" else "offload"

    def evaluates(self, compute: Compute) -> bool:
        """Whether nothing is kept of this operation for a backward."""
        return Phase("evaluate", compute.micro) in self.order

    def internals(self, compute: Compute) -> Internals:
        """What the operation keeps, or finds kept, of its layer."""
        layer = compute.unit - self.first
        if self.evaluates(compute) or compute.kind not in ("forward", "backward") or not 0 <= layer < self.layers:
            return "none"
        return self.policy.layers[layer].internals

    def boundary_bytes(self, unit: int) -> int:
        """Bytes of a layer's input."""
        return self._boundary_bytes[unit - self.first]

    def end_of_forward(self, micro: int) -> int:
        """Position of a micro-batch's loss, or 0 if that is in another program."""
        return self.position.get(self.id("loss", self.head, micro), 0)

    def freed_by(self, position: int) -> list[str]:
        """The compute operation there, after which there is room for something else; none before the first."""
        return [self.computes[position].id] if position >= 0 else []

    # ---- what is added to it

    def transfer(self, at: int, kind: Kind, stream: Stream, compute: Compute, size: int, after: list[str]) -> str:
        """Issue a transfer of ``size`` bytes of the operation's unit before the position; its name."""
        name = self.id(kind, compute.unit, compute.micro)
        self.issue(at, Op(name, kind, stream, compute.unit, compute.micro, size, tuple(after)))
        return name

    def issue(self, at: int, op: Op) -> None:
        """Put an operation before a position; on the way to the GPU, never before what was put there already."""
        if op.stream == "h2d" or op.kind == "fetch":
            at = self._last_arrival = max(at, self._last_arrival)
        self._early[at].append(op)
        self.placed_at[op.id] = at

    def hold(self, name: str, tier: Tier, size: int, acquired_by: str = "", *released_by: str) -> None:
        """Hold memory from the start of one operation to the end of others; see `Buffer`."""
        if size:
            self.buffers.append(Buffer(name, tier, size, acquired_by, released_by))

    # ---- the list

    @property
    def transfers(self) -> Iterator[Op]:
        """All that was issued."""
        return itertools.chain.from_iterable(self._early.values())

    def in_order(self) -> list[Op]:
        """Compute operations, each after what was issued before it."""
        ops: list[Op] = []
        for position, c in enumerate(self.computes):
            ops += self._early[position]
            workspace, internals = self._workspace(c), self.internals(c)
            ops.append(Op(c.id, c.kind, "compute", c.unit, c.micro, 0, tuple(c.after), c.slot, workspace, internals))
        return ops + self._early[len(self.computes)]

    def _workspace(self, compute: Compute) -> int:
        unit = self.units[compute.unit]
        if self.facts.loss == "chunks" and compute.unit == self.head and not self.evaluates(compute):
            return unit.backward_workspace_bytes if compute.kind == "loss" else 0  # the loss makes all gradients
        return unit.workspaces(self.internals(compute))[compute.kind == "backward"]
