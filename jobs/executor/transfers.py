"""What each operation beside compute does: the work for its stream, and the bytes that it moves there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..policy import Op, Program
from ..replay import Call
from .buffers import Before
from .devices import Device
from .internals import Internals
from .parking import KINDS, Parking
from .stores import ActivationStore, HostUnit, Optimizer
from .weights import DeviceWeights

Work = Callable[[], None]
Transfer = tuple[Work, int]
"""Work for a stream, and the bytes it moves."""
Key = tuple[int, int]
"""Unit and micro-batch."""
Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An optimizer step that is decided but not yet applied to every unit."""

    step: int
    lr: float
    scale: float


@dataclass
class InFlight:
    """What a step holds between its operations."""

    calls: dict[Key, Call] = field(default_factory=dict)
    buffers: dict[Key, list[Before]] = field(default_factory=dict)
    """Buffers that a forward has changed, as they were before it."""
    kept: dict[Key, Internals] = field(default_factory=dict)
    outgoing: dict[Key, Gradients] = field(default_factory=dict)
    """Gradients on the device, by parameter name, until they leave."""
    staged: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients on the host that wait to be added up, by the operation that does it."""
    squares: dict[int, float] = field(default_factory=dict)
    """Of each master's gradient."""

    def forget(self, micro: int) -> None:
        """Drop what belongs to one micro-batch."""
        for held in (self.calls, self.buffers, self.kept, self.outgoing):
            for key in [key for key in held if key[1] == micro]:
                del held[key]


class Transfers:
    """Prepares the operations of one program at a time; ``prepare`` is called in the program's order."""

    store: ActivationStore
    parking: Parking

    def __init__(
        self,
        units: Sequence[HostUnit],
        owner: Sequence[int],
        weights: DeviceWeights,
        device: Device,
        optimizer: Optimizer | None,
    ) -> None:
        """``owner`` gives for each unit the one that owns its (tied) weights."""
        self._units, self._owner, self._weights = units, owner, weights
        self._device, self._optimizer = device, optimizer
        self._staging: list[torch.Tensor] = []
        self.before_update: Callable[[str, int], None] = lambda unit, step: None
        """Called before each update, with its unit and step, on the stream that runs it."""
        self.begin()

    def begin(self) -> None:
        """Forget everything that belongs to the step before."""
        self.in_flight = InFlight()
        self._weights.clear()

    def forget(self, micro: int) -> None:
        """The backward of a micro-batch will not come."""
        self.in_flight.forget(micro)

    def allocate_gradients(self, program: Program) -> None:
        """Host memory for the gradients of the training program that is about to begin."""
        terms = Counter(self._owner[op.unit] for op in program.ops if op.kind in ("gradient", "accumulate"))
        for unit, count in terms.items():
            if not self.parking.holds_gradient_of(unit):
                self._units[unit].gradient_buffer(self._device, adds=count > 1)
        sizes = [buffer.bytes for buffer in program.buffers if buffer.name.startswith("gradient_staging.")]
        dtype = self._units[0].dtype
        if sizes != [buffer.nbytes for buffer in self._staging]:
            self._staging = [self._device.host_empty(size // dtype.itemsize, dtype) for size in sizes]
        self._adds = frozenset(op.id for op in program.ops if op.kind == "accumulate")

    @property
    def staging_bytes(self) -> int:
        """Host memory of gradients that wait to be added up."""
        return sum(buffer.nbytes for buffer in self._staging)

    def prepare(self, op: Op) -> Transfer:
        """The work of any operation but compute and ``update``."""
        if op.kind in KINDS:
            return self.parking.prepare(op)
        transfer: Transfer = getattr(self, f"_{op.kind}")(op)
        return transfer

    def spent_by(self, op: Op) -> list[torch.Tensor]:
        """The host memory that ``op``, which is about to be prepared, is the last to read."""
        return [self.in_flight.staged[op.id]] if op.kind == "accumulate" else self.store.spent_by(op)

    def update(self, op: Op, update: PendingUpdate) -> Work:
        """Apply the gradient to a master."""
        unit = self._units[op.unit]
        assert unit.gradient is not None
        gradient = unit.gradient

        def work() -> None:
            self.before_update(unit.name, update.step)
            unit.weights.update(gradient, step=update.step, scale=update.scale, lr=update.lr)

        return self.parking.update(op.unit, work)

    # ---- weights and activations

    def _load(self, op: Op) -> Transfer:
        source = self._units[self._owner[op.unit]].weights.streamed
        target = self._weights.target(op, source.numel(), source.dtype)
        self._device.lend(target, "h2d")
        return lambda: self._device.copy(target, source), source.nbytes

    def _offload(self, op: Op) -> Transfer:
        return self.store.offload((op.unit, op.micro))

    def _write(self, op: Op) -> Transfer:
        return self.store.write((op.unit, op.micro))

    def _read(self, op: Op) -> Transfer:
        return self.store.read((op.unit, op.micro))

    def _reload(self, op: Op) -> Transfer:
        return self.store.reload((op.unit, op.micro))

    def _spill(self, op: Op) -> Transfer:
        return self.store.spill((op.unit, op.micro))

    def _fetch(self, op: Op) -> Transfer:
        return self.store.fetch((op.unit, op.micro))

    def _swap_out(self, op: Op) -> Transfer:
        key = (op.unit, op.micro)
        return self.store.swap_out(key, self.in_flight.kept[key])

    def _swap_in(self, op: Op) -> Transfer:
        key = (op.unit, op.micro)
        return self.store.swap_in(key, self.in_flight.kept.get(key))

    # ---- gradients

    def _gradient(self, op: Op) -> Transfer:
        owner, gradients = self._units[self._owner[op.unit]], self.in_flight.outgoing.pop((op.unit, op.micro))
        into = self._place_of_gradient(op, owner)
        for gradient in gradients.values():
            if gradient is not None:
                self._device.lend(gradient, "d2h")
        return lambda: owner.receive(gradients, into, self._device), op.bytes

    def _place_of_gradient(self, op: Op, owner: HostUnit) -> torch.Tensor:
        """The master's own buffer for its first gradient, the next staging buffer for those that are added to it."""
        addition, staged = op.id.replace("gradient.", "accumulate.", 1), self.in_flight.staged
        if addition in self._adds:
            staged[addition] = self._staging[len(staged) % len(self._staging)][: owner.learning.numel]
            return staged[addition]
        if self.parking.holds_gradient_of(self._owner[op.unit]):
            self.parking.place_gradient(self._owner[op.unit])
        assert owner.gradient is not None
        return owner.gradient

    def _accumulate(self, op: Op) -> Transfer:
        into, part = self._units[self._owner[op.unit]].gradient, self.in_flight.staged[op.id]
        assert into is not None
        return lambda: _add(into, part), op.bytes

    def _norm(self, op: Op) -> Transfer:
        gradient, squares, optimizer = self._units[op.unit].gradient, self.in_flight.squares, self._optimizer
        assert gradient is not None

        def work() -> None:
            if optimizer is not None:
                squares[op.unit] = optimizer.squares(gradient)

        return work, op.bytes

    def _clip(self, op: Op) -> Transfer:
        return (lambda: None), 0


def _add(into: torch.Tensor, part: torch.Tensor) -> None:
    into += part
