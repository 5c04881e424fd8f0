"""From a policy to the step program: first the order of compute, then each transfer as early as memory permits.

Everything that comes to the GPU comes in the order in which compute needs it. What a layer needs is sent for when the
layer that was used ``weight_slots`` layers before it is done; its weights, when the oldest slot is free.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..errors import ProgramError
from ..model_facts import Internals, ModelFacts
from .artifact import Home, Policy
from .order import NORMS, Order, Phase, micro_batches
from .parked import RING, Parked, RingUses, blocks, update_phase
from .program import Buffer, Kind, Op, Program, Stream, Tier, unit_labels
from .waits import without_implied

ComputeKind = Literal["forward", "loss", "recompute", "backward"]

NVME_STAGING = 2
"""Host buffers through which boundaries pass on their way to NVMe and back."""
GRADIENT_STAGING = 2
"""Host buffers in which gradients wait to be added to those that came before."""
HEAD_AHEAD = 3
"""Units after the layers are loaded this many operations ahead in forward, so that the head comes under a layer."""
_LOAD_PHASE = {"forward": "", "loss": "", "recompute": ".r", "backward": ".b"}


def lower(
    policy: Policy, facts: ModelFacts, *, order: Order = (), state_bytes: Mapping[int, int] | None = None
) -> Program:
    """The program of one training step. Raises ProgramError for a policy made for other facts.

    ``order`` is by default forward and backward of each of the policy's micro-batches in turn. In another order, every
    forward must have its backward, and `NORMS` is the last phase. ``state_bytes`` are the true bytes, by unit, of
    optimizer state on NVMe; without them the 8-bit optimizer's count.
    """
    policy.check(facts)
    lowering = _Lowering(policy, facts, Parked.of(policy, facts, state_bytes))
    for phase in order or micro_batches(policy.accumulation):
        lowering.add(phase)
    return lowering.finish()


def lower_rest(policy: Policy, facts: ModelFacts, order: Order, *, gradients: bool) -> Program:
    """Phases with which a step goes on, when all before them have ended, in another order than was thought.

    ``gradients`` says whether the step has some already, to which those of these phases are to be added. Raises
    ProgramError where these are on NVMe, whose room is given out before the step.
    """
    parked = Parked.of(policy, facts)
    if parked.gradients and any(phase.kind in ("backward", "norms") for phase in order):
        raise ProgramError(
            "gradients on NVMe need a step of the policy's micro-batches, forward and backward in turn",
            hint="set streamed.accumulation before a step that has fewer or more, or plan with gradients on the host",
        )
    lowering = _Lowering(policy, facts, Parked(parked.state, frozenset()), whole=False, gradients=gradients)
    for phase in order:
        lowering.add(phase)
    return lowering.finish()


def lower_forward(facts: ModelFacts, *, weight_slots: int = 2) -> Program:
    """The program of one forward pass without gradients: what evaluation and generation run."""
    homes: list[Home] = ["gpu"] * (len(facts.layers) + 1)
    policy = Policy.from_homes(facts, homes, weight_slots=weight_slots)
    return lower_rest(policy, facts, (Phase("evaluate", 0),), gradients=False)


@dataclass(slots=True)
class _Compute:
    """A compute operation whose transfers are still being placed."""

    kind: ComputeKind
    unit: int
    micro: int
    id: str
    after: list[str] = field(default_factory=list)
    slot: int = -1


class _Lowering:
    def __init__(
        self, policy: Policy, facts: ModelFacts, parked: Parked, *, whole: bool = True, gradients: bool = False
    ) -> None:
        self.whole, self.gradients, self.order = whole, gradients, list[Phase]()
        self.policy, self.facts, self.units, self.parked = policy, facts, facts.units, parked
        self.labels = unit_labels(tuple(u.kind for u in self.units), tuple(u.name for u in self.units))
        self.first, self.layers, self.head = len(facts.before), len(facts.layers), len(self.units) - 1
        by_name = {unit.name: i for i, unit in enumerate(self.units)}
        self.owner = [by_name.get(unit.shares_weights_with, i) for i, unit in enumerate(self.units)]
        self.learning = [u for u, unit in enumerate(self.units) if self.owner[u] == u and unit.gradient_bytes]
        self.computes: list[_Compute] = []
        self.position: dict[str, int] = {}
        self.early: dict[int, list[Op]] = defaultdict(list)  # what is issued just before the compute operation there
        self.placed_at: dict[str, int] = {}
        self.issued: dict[str, list[str]] = defaultdict(list)  # by kind, where a ring of buffers limits how many
        self.staged: list[str] = []  # for each use of an NVMe staging buffer, what ends it
        self.staged_at = 0  # they are taken in the order of the program
        self.leaving: dict[str, deque[tuple[int, str]]] = {"offload": deque(), "swap_out": deque()}  # by position
        self.last_h2d = 0
        self.ring: list[tuple[int, int]] = [(-1, -1)] * policy.weight_slots  # unit held, last position that used it
        self.recent: dict[int, int] = {}  # the layers used last, oldest first, and the position of that use
        resident = [self.first + layer.index for layer in policy.layers if layer.resident]
        self.loaded: dict[int, str] = {}  # residents, and what loaded them
        self.resident = {unit: policy.weight_slots + i for i, unit in enumerate(resident)}  # unit to its own slot
        self.buffers: list[Buffer] = []

    # ---- the order of compute

    def add(self, phase: Phase) -> None:
        """One pass over the units."""
        self.order.append(phase)
        {"forward": self._add_forward, "backward": self._add_backward, "evaluate": self._add_evaluation}.get(
            phase.kind, lambda _: None
        )(phase.micro)

    def _add_forward(self, micro: int) -> None:
        for unit in range(self.head):
            self._compute("forward", unit, micro)
        self._compute("loss", self.head, micro)

    def _add_evaluation(self, micro: int) -> None:
        for unit in range(len(self.units)):
            self._compute("forward", unit, micro)

    def _add_backward(self, micro: int) -> None:
        for unit in range(self.head, self.first + self.layers - 1, -1):
            self._compute("backward", unit, micro)
        self._add_layers_backward(micro)
        for unit in range(self.first - 1, -1, -1):
            self._compute("backward", unit, micro)

    def _add_layers_backward(self, micro: int) -> None:
        homes = self.policy.homes
        known_from = self.layers  # boundaries from here on are on the GPU or at their home
        for layer in range(self.layers - 1, -1, -1):
            if homes[layer] == "recompute" and layer < known_from:
                start = max(i for i in range(layer) if homes[i] != "recompute")
                for inner in range(start, layer):
                    self._compute("recompute", self.first + inner, micro)
                known_from = start + 1
            self._compute("backward", self.first + layer, micro)

    def _compute(self, kind: ComputeKind, unit: int, micro: int) -> None:
        compute = _Compute(kind, unit, micro, self._id(kind, unit, micro))
        self.position[compute.id] = len(self.computes)
        self.computes.append(compute)

    def _id(self, kind: str, unit: int, micro: int) -> str:
        return f"{kind}.{self.labels[unit]}@{micro}"

    # ---- transfers

    def finish(self) -> Program:
        """Place every transfer and buffer around the compute operations."""
        self.contributions = Counter(self.owner[c.unit] for c in self.computes if c.kind == "backward")
        updates = self._updates()
        self.gradient_ring = RingUses(
            [f"update.{self.labels[op.unit]}" for op in updates if op.kind == "read_gradient"]
        )
        for position, compute in enumerate(self.computes):
            self._wait_for_copies_out(position, compute)
            self._place_load(position, compute)
            home = self._home(compute.unit)
            if home in ("host", "nvme") and not self._evaluates(compute):
                if compute.kind == "forward":
                    self._place_offload(position, compute, home)
                elif (
                    compute.kind == "recompute" or self._id("reload", compute.unit, compute.micro) not in self.placed_at
                ):
                    self._place_reload(compute, home)
            if self._internals(compute) != "none":
                self._place_internals(position, compute)
            if compute.kind == "backward":
                self._place_gradient(position, compute)
            self._hold_results(compute)
            self._remember(position, compute)
        if NORMS in self.order:
            self._place_norms()
        self._hold_static()
        ops = (*updates, *self._in_order(), *self._clip())
        if not self.whole:
            ops = _without_waits_for_others(ops)
        known = {op.id for op in ops}
        buffers = tuple(_within(buffer, known) for buffer in self.buffers)
        program = Program(without_implied(ops), buffers, tuple(self.order), self.whole)
        return replace(program, promised=program.moments)

    def _evaluates(self, compute: _Compute) -> bool:
        """Whether nothing is kept of this operation for a backward."""
        return Phase("evaluate", compute.micro) in self.order

    def _home(self, unit: int) -> Home | None:
        """Home of a layer's input; None for units that are not layers."""
        layer = unit - self.first
        return self.policy.homes[layer] if 0 <= layer < self.layers else None

    def _wait_for_copies_out(self, position: int, compute: _Compute) -> None:
        """What a layer sends to the host has ``staging_slots`` compute operations to get there.

        Of gradients, which every layer has, ``staging_slots`` may be on their way.
        """
        for queue in self.leaving.values():
            while queue and queue[0][0] <= position - self.policy.staging_slots:
                _, name = queue.popleft()
                compute.after.append(name)
        if len(self.issued["gradient"]) >= self.policy.staging_slots:
            compute.after.append(self.issued["gradient"][-self.policy.staging_slots])

    def _place_load(self, position: int, compute: _Compute) -> None:
        unit = self.units[compute.unit]
        if compute.kind == "backward" and compute.unit == self.head:
            return  # the loss made the head's gradients; backward only scales them
        if unit.kind != "layer":
            ahead = HEAD_AHEAD if compute.kind != "backward" and unit.kind != "before" else 2
            load = self._load(compute, at=position - ahead + 1, freed_by=position - ahead)
            kept = compute.kind == "loss" and self.facts.loss == "whole"  # for a backward that autograd does
            last = self._id("backward", compute.unit, compute.micro) if kept else compute.id
            self._hold(f"weights.{load}", "gpu", unit.weight_bytes, load, last)
            return
        if compute.unit in self.resident:
            compute.slot = self.resident[compute.unit]
            if compute.unit in self.loaded:
                compute.after.append(self.loaded[compute.unit])
            else:
                self.loaded[compute.unit] = self._load(compute, at=min(used for _, used in self.ring) + 1)
            return
        held = [s for s, (holds, _) in enumerate(self.ring) if holds == compute.unit]
        compute.slot = held[0] if held else min(range(len(self.ring)), key=lambda s: self.ring[s][1])
        if not held:
            used = self.ring[compute.slot][1]
            self._load(compute, at=used + 1, freed_by=used)
        self.ring[compute.slot] = (compute.unit, position)

    def _load(self, compute: _Compute, *, at: int, freed_by: int = -1) -> str:
        """Load weights before the compute operation at ``at``, when the one at ``freed_by`` has left their buffer."""
        label = self.labels[compute.unit]
        owner = self.owner[compute.unit]
        after = [f"update.{self.labels[owner]}"] if self.units[owner].gradient_bytes else []
        if freed_by >= 0:
            after.append(self.computes[freed_by].id)
        name = f"load.{label}{_LOAD_PHASE[compute.kind]}@{compute.micro}"
        size = self.units[compute.unit].weight_bytes
        self._issue(max(0, at), Op(name, "load", "h2d", compute.unit, compute.micro, size, tuple(after), compute.slot))
        compute.after.append(name)
        return name

    def _place_offload(self, position: int, compute: _Compute, home: Home) -> None:
        """Copy a boundary out while the layer that reads it computes; write it on to NVMe if it lives there."""
        size = self._boundary_bytes(compute.unit)
        after = [self.computes[position - 1].id]
        if home == "nvme" and len(self.staged) >= NVME_STAGING:
            after.append(self.staged[-NVME_STAGING])
        offload = self._transfer(position, "offload", "d2h", compute, size, after)
        self.leaving["offload"].append((position, offload))
        if home == "nvme":
            self.staged_at = position
            self.staged.append(self._transfer(position, "write", "nvme_write", compute, size, [offload]))

    def _place_reload(self, compute: _Compute, home: Home) -> None:
        """Bring a boundary back to the GPU as many layers ahead as there are weight slots."""
        unit, micro, size = compute.unit, compute.micro, self._boundary_bytes(compute.unit)
        forward = self.position.get(self._id("forward", unit, micro), -1)
        freed_at = max(self._layers_ago(), forward)
        stored = self._id("offload", unit, micro)
        if home == "nvme":
            freed_at = max(freed_at, self._end_of_forward(micro) - 1)
            stored = self._place_read(compute, size)
        at = max(freed_at + 1, self.placed_at.get(stored, 0))
        reload = self._transfer(at, "reload", "h2d", compute, size, [stored, *self._freed_by(freed_at)])
        compute.after.append(reload)
        self._hold(f"boundary.{reload}", "gpu", size, reload, self._id("backward", unit, micro))
        if home == "nvme":
            self._hold(f"boundary.{stored}", "nvme", size, self._id("write", unit, micro), stored)
        else:
            self._hold(f"boundary.{stored}", "host", size, stored, reload)

    def _place_read(self, compute: _Compute, size: int) -> str:
        """Read into a host staging buffer once the forward is over and a buffer is empty."""
        at, after = self._end_of_forward(compute.micro), []
        if len(self.staged) >= NVME_STAGING:
            after = [self.staged[-NVME_STAGING]]
            at = max(at, self.placed_at[after[0]], self.staged_at)
        self.staged_at = at
        write = self._id("write", compute.unit, compute.micro)
        read = self._transfer(at, "read", "nvme_read", compute, size, [write, *after])
        self.staged.append(self._id("reload", compute.unit, compute.micro))
        return read

    def _end_of_forward(self, micro: int) -> int:
        """Position of a micro-batch's loss, or 0 if that is in another program."""
        return self.position.get(self._id("loss", self.head, micro), 0)

    def _freed_by(self, position: int) -> list[str]:
        """The compute operation there, after which there is room for something else; none before the first."""
        return [self.computes[position].id] if position >= 0 else []

    def _internals(self, compute: _Compute) -> Internals:
        layer = compute.unit - self.first
        if self._evaluates(compute) or compute.kind not in ("forward", "backward") or not 0 <= layer < self.layers:
            return "none"
        return self.policy.layers[layer].internals

    def _place_internals(self, position: int, compute: _Compute) -> None:
        """Hold what a layer's forward keeps until its backward, on the GPU or swapped to the host in between."""
        forward, backward = (self._id(kind, compute.unit, compute.micro) for kind in ("forward", "backward"))
        size = self.units[compute.unit].kept_bytes(self._internals(compute))
        swapped = self.policy.layers[compute.unit - self.first].internals_home == "host"
        if compute.kind == "forward":
            released = backward
            if swapped:
                released = self._transfer(position + 1, "swap_out", "d2h", compute, size, [forward])
                self.leaving["swap_out"].append((position, released))
            self._hold(f"internals.{forward}", "gpu", size, forward, released)
        elif swapped:
            swap_out = self._id("swap_out", compute.unit, compute.micro)
            freed_at = max(self._layers_ago(), self.position.get(forward, -2) + 1)
            after = [swap_out, *self._freed_by(freed_at)]
            swap_in = self._transfer(freed_at + 1, "swap_in", "h2d", compute, size, after)
            compute.after.append(swap_in)
            self._hold(f"internals.{swap_in}", "gpu", size, swap_in, backward)
            self._hold(f"internals.{swap_out}", "host", size, swap_out, swap_in)

    def _place_gradient(self, position: int, compute: _Compute) -> None:
        """Copy a unit's gradient out; all but the first that a master gets are added to what is there."""
        owner, size = self.owner[compute.unit], self.units[compute.unit].gradient_bytes
        if not size:
            return  # all of it is frozen
        adds = self.gradients or bool(self.issued[f"into.{owner}"])
        after = [compute.id]
        if adds and len(self.issued["accumulate"]) >= GRADIENT_STAGING:
            after.append(self.issued["accumulate"][-GRADIENT_STAGING])
        into = self._place_on_host(position, compute, adds)
        after += [] if adds else into
        landed = gradient = self._transfer(position + 1, "gradient", "d2h", compute, size, after)
        early = compute.unit == self.head and self.facts.loss == "chunks"
        made_by = self._id("loss", compute.unit, compute.micro) if early else compute.id
        self._hold(gradient, "gpu", size, made_by, gradient)
        if adds:
            landed = self._transfer(position + 1, "accumulate", "cpu", compute, size, [gradient, *into])
        self.issued[f"into.{owner}"].append(landed)
        if owner in self.parked.gradients and len(self.issued[f"into.{owner}"]) < self.contributions[owner]:
            size = self._host_gradient_bytes(owner)
            self._transfer(position + 1, "write_gradient", "nvme_write", compute, size, [landed])

    def _place_on_host(self, position: int, compute: _Compute, adds: bool) -> list[str]:
        """What makes a parked gradient's place on the host ready: its buffer's last use, or the read of its sum so far.

        The sum is read while the unit's next contribution is computed.
        """
        owner = self.owner[compute.unit]
        if owner not in self.parked.gradients:
            return []
        empty = self.gradient_ring.take(self._id("write_gradient", compute.unit, compute.micro))
        if not adds:
            return empty
        _, before = self.issued[f"into.{owner}"][-1].split(".", 1)
        after = [f"write_gradient.{before}", *empty]
        size = self._host_gradient_bytes(owner)
        return [self._transfer(position, "read_gradient", "nvme_read", compute, size, after)]

    def _host_gradient_bytes(self, owner: int) -> int:
        """Bytes of a gradient on the host: float32 where contributions are added up."""
        elements = self.units[owner].gradient_bytes // self.facts.element_bytes
        return elements * (4 if self.gradients or self.contributions[owner] > 1 else self.facts.element_bytes)

    def _place_norms(self) -> None:
        """Sum the squares of each master's gradient right after its last contribution has landed."""
        landed = {owner: self.issued[f"into.{owner}"][-1:] for owner in self.learning}
        at = {owner: self.placed_at[names[0]] if names else 0 for owner, names in landed.items()}
        for owner in sorted(self.learning, key=at.__getitem__):
            size = self.units[owner].gradient_bytes
            norm = Op(f"norm.{self.labels[owner]}", "norm", "cpu", owner, 0, size, tuple(landed[owner]))
            self._issue(at[owner], norm)
            if owner in self.parked.gradients:
                last, size = landed[owner][0].split(".", 1)[1], self._host_gradient_bytes(owner)
                written = Op(f"write_gradient.{last}", "write_gradient", "nvme_write", owner, 0, size, (norm.id,))
                self._issue(at[owner], written)

    def _transfer(self, at: int, kind: Kind, stream: Stream, compute: _Compute, size: int, after: list[str]) -> str:
        name = self._id(kind, compute.unit, compute.micro)
        self._issue(at, Op(name, kind, stream, compute.unit, compute.micro, size, tuple(after)))
        return name

    def _remember(self, position: int, compute: _Compute) -> None:
        """Note a layer's use, and forget the one that was used longest ago beyond ``weight_slots``."""
        if self.units[compute.unit].kind == "layer":
            self.recent.pop(compute.unit, None)
            self.recent[compute.unit] = position
            if len(self.recent) > self.policy.weight_slots:
                del self.recent[next(iter(self.recent))]

    def _layers_ago(self) -> int:
        """Position of the last use of the layer used ``weight_slots`` layers ago; -1 if there were fewer."""
        return next(iter(self.recent.values())) if len(self.recent) == self.policy.weight_slots else -1

    def _issue(self, at: int, op: Op) -> None:
        if op.stream == "h2d":
            at = self.last_h2d = max(at, self.last_h2d)
        self.early[at].append(op)
        self.placed_at[op.id] = at
        self.issued[op.kind].append(op.id)

    def _boundary_bytes(self, unit: int) -> int:
        return self.facts.boundary_bytes[unit - self.first]

    # ---- memory

    def _hold_results(self, compute: _Compute) -> None:
        unit, micro = compute.unit, compute.micro
        if compute.kind == "forward" and unit < self.head:
            self._hold_output(compute)
        elif compute.kind == "recompute":
            backward = self._id("backward", unit + 1, micro)
            self._hold(f"output.{compute.id}", "gpu", self.units[unit].output_bytes, compute.id, backward)
        elif self._makes_gradient(compute):
            size = self._boundary_bytes(unit) if unit < self.first + self.layers else self.units[unit - 1].output_bytes
            reader = self._id("backward", unit - 1 if unit > self.first else 0, micro)
            self._hold(f"gradient_out.{compute.id}", "gpu", size, compute.id, reader if self.first else compute.id)

    def _makes_gradient(self, compute: _Compute) -> bool:
        """Whether the operation leaves the gradient of its input, for the backward of the unit before."""
        if compute.unit == self.head:
            return compute.kind == ("loss" if self.facts.loss == "chunks" else "backward")
        return compute.kind == "backward" and compute.unit >= self.first

    def _hold_output(self, compute: _Compute) -> None:
        """An output lives until the next unit has read it and, where it stays on the GPU, run backward from it."""
        unit, micro, size = compute.unit, compute.micro, self.units[compute.unit].output_bytes
        held_by_model: list[str] = []
        if unit < self.first:
            self._hold(f"output.{compute.id}", "gpu", size, compute.id, self._id("forward", self.first, micro))
            if unit < self.first - 1:
                return
            size = self._boundary_bytes(self.first)  # the model adds the embeddings up to boundary 0
            held_by_model = [self._id("forward", self.head - 1, micro)] if self.facts.input_stays else []
        reader = unit + 1
        keeps = not self._evaluates(compute)
        released = [self._id("loss" if keeps and reader == self.head else "forward", reader, micro)]
        home = self._home(reader) or "gpu"
        if keeps and home == "gpu":
            released = [self._id("backward", reader, micro)]
        elif keeps and home != "recompute":
            released.append(self._id("offload", reader, micro))
        self._hold(f"boundary.{compute.id}", "gpu", size, compute.id, *released, *held_by_model)

    def _hold_static(self) -> None:
        largest = max(layer.weight_bytes for layer in self.facts.layers)
        sizes = [largest] * self.policy.weight_slots + [self.units[unit].weight_bytes for unit in self.resident]
        for slot, size in enumerate(sizes):
            self._hold(f"slot.{slot}", "gpu", size)
        self._hold("side", "gpu", self.facts.side_bytes)
        moved: dict[str, int] = defaultdict(int)
        for op in itertools.chain.from_iterable(self.early.values()):
            moved[op.kind] = max(moved[op.kind], op.bytes)
        for name, kind, count in (("nvme", "write", NVME_STAGING), ("gradient", "accumulate", GRADIENT_STAGING)):
            for slot in range(count):
                self._hold(f"{name}_staging.{slot}", "host", moved[kind])
        self._hold_parked()

    def _hold_parked(self) -> None:
        gradients = {unit: self._host_gradient_bytes(unit) for unit in self.parked.gradients}
        for name, sizes in (("state", self.parked.state), ("gradient", gradients)):
            for slot in range(min(RING, len(sizes))):
                self._hold(f"{name}_ring.{slot}", "host", max(sizes.values()))
            for unit, size in sorted(sizes.items()):
                self._hold(f"{name}_home.{self.labels[unit]}", "nvme", blocks(size))

    def _hold(self, name: str, tier: Tier, size: int, acquired_by: str = "", *released_by: str) -> None:
        if size:
            self.buffers.append(Buffer(name, tier, size, acquired_by, released_by))

    # ---- the list

    def _updates(self) -> list[Op]:
        """Apply the gradients of the step before, in the order in which the forward pass needs the weights."""
        if not self.whole:
            return []
        sizes = [unit.gradient_bytes for unit in self.units]
        return update_phase(self.parked, self.learning, self.labels, sizes, self._host_gradient_bytes)

    def _in_order(self) -> list[Op]:
        ops: list[Op] = []
        for position, c in enumerate(self.computes):
            ops += self.early[position]
            workspace, internals = self._workspace(c), self._internals(c)
            ops.append(Op(c.id, c.kind, "compute", c.unit, c.micro, 0, tuple(c.after), c.slot, workspace, internals))
        return ops + self.early[len(self.computes)]

    def _clip(self) -> list[Op]:
        """The clip factor needs every norm; the next step's updates need it."""
        norms = tuple(self.issued["norm"])
        return [Op("clip", "clip", "cpu", -1, after=norms)] if norms else []

    def _workspace(self, compute: _Compute) -> int:
        unit = self.units[compute.unit]
        if self.facts.loss == "chunks" and compute.unit == self.head and not self._evaluates(compute):
            return unit.backward_workspace_bytes if compute.kind == "loss" else 0  # the loss makes all gradients
        return unit.workspaces(self._internals(compute))[compute.kind == "backward"]


def _without_waits_for_others(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Without the waits for operations of other programs, which have ended."""
    known = {op.id for op in ops}
    return tuple(replace(op, after=tuple(name for name in op.after if name in known)) for op in ops)


def _within(buffer: Buffer, known: Collection[str]) -> Buffer:
    """The buffer as far as this program has to do with it: all along where another acquires or releases it."""
    return replace(
        buffer,
        acquired_by=buffer.acquired_by if buffer.acquired_by in known else "",
        released_by=buffer.released_by if all(name in known for name in buffer.released_by) else (),
    )
