"""The debug mode: proves a program's waits before it runs, and watches that the engine keeps them while it does.

Proof (`policy.hazards`) does not depend on timing. Watching does, but random delays and the poison help: memory whose
content nobody may read any more is filled with NaN, so that a late reader is seen in its result.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from ..errors import InvariantBroken
from ..model_facts import ModelFacts
from ..policy import UPDATE_PHASE, Op, Program
from ..policy.hazards import Hazard, accesses, check
from .devices import Device, Event
from .transfers import Transfer, Transfers
from .weights import DeviceWeights

USERS_BYTES = 4096
"""Of the device, for what the user holds beside the model's tensors: losses that are added up, say."""


class NoChecks:
    """What the interpreter tells about each operation; here nothing comes of it."""

    def begin(self, program: Program, events: Mapping[str, Event]) -> None:
        """A program starts; ``events`` will hold those of its operations."""

    def prepare(self, op: Op, transfers: Transfers) -> Transfer:
        """The work of a transfer that is about to be handed over."""
        return transfers.prepare(op)

    def starting(self, op: Op) -> None:
        """A compute operation has waited for what it needs."""

    def finished(self, op: Op) -> None:
        """A compute operation has ended."""

    def step_taken(self) -> None:
        """The program that runs was the last of its step."""


class Checks(NoChecks):
    """Raises InvariantBroken, which names the invariant and the operation."""

    def __init__(
        self, facts: ModelFacts, device: Device, weights: DeviceWeights, host_bytes: Callable[[], int]
    ) -> None:
        """``host_bytes`` gives what activations, and what passes through rings, hold on the host."""
        self._facts, self._device, self._weights, self._host_bytes = facts, device, weights, host_bytes
        self._host_allowed = 0

    def begin(self, program: Program, events: Mapping[str, Event]) -> None:
        self._program, self._events = program, events
        self._needs: dict[str, list[Hazard]] = defaultdict(list)
        for hazard in check(program, self._facts):
            self._needs[hazard.later].append(hazard)
        self._last_in_slot = _last_readers(program, self._facts)
        self._ran = {op.id for op in itertools.takewhile(lambda op: op.kind in UPDATE_PHASE, program.ops)}
        self._device_allowed = max(program.peak_bytes("gpu") + USERS_BYTES, self._device.peak_bytes)
        self._check_host(program)

    def prepare(self, op: Op, transfers: Transfers) -> Transfer:
        self._once(op)
        spent, needs, events = transfers.spent_by(op), self._needs[op.id], self._events
        work, nbytes = transfers.prepare(op)

        def guarded() -> None:
            _check_ended(op, needs, events)
            work()
            for memory in spent:
                poison(memory)

        return guarded, nbytes

    def starting(self, op: Op) -> None:
        self._once(op)
        _check_ended(op, self._needs[op.id], self._events)

    def finished(self, op: Op) -> None:
        if op.id in self._last_in_slot:
            poison(self._weights.slot(op.slot))
        used = self._device.peak_bytes
        if self._program.whole and used > self._device_allowed:
            why = f"{used:,} bytes were used on the device, {self._device_allowed:,} promised"
            raise InvariantBroken("bytes as promised", op.id, why)

    def step_taken(self) -> None:
        left = [op.id for op in self._program.ops if op.id not in self._ran]
        if left:
            raise InvariantBroken("each once", left[0], "it has not run in this step")

    def _once(self, op: Op) -> None:
        if op.id in self._ran:
            raise InvariantBroken("each once", op.id, "it runs a second time in one step")
        self._ran.add(op.id)

    def _check_host(self, program: Program) -> None:
        """Room on the host is made before a program starts. What an unforeseen order once took is kept."""
        used, promised = self._host_bytes(), program.peak_bytes("host")
        if not program.whole:
            self._host_allowed = max(self._host_allowed, used)
        elif used > max(promised, self._host_allowed):
            raise InvariantBroken(
                "bytes as promised", program.ops[0].id, f"{used:,} bytes are held on the host, {promised:,} promised"
            )


def _check_ended(op: Op, needs: Sequence[Hazard], events: Mapping[str, Event]) -> None:
    for hazard in needs:
        if not events[hazard.earlier].has_ended:
            why = f"{hazard.earlier}, which uses {hazard.place}, has not ended"
            raise InvariantBroken(hazard.invariant, op.id, why)


def poison(memory: torch.Tensor) -> None:
    """Fill memory with bytes that are NaN in every floating dtype."""
    memory.view(torch.uint8).fill_(0xFF)


def _last_readers(program: Program, facts: ModelFacts) -> set[str]:
    """The compute operations after which a slot's weights are not read again."""
    last: dict[str, str] = {}
    leavers = set()
    for op, access in zip(program.ops, accesses(program, facts), strict=True):
        for place in access.writes:
            if place in last:
                leavers.add(last.pop(place))
        last |= {place: op.id for place in access.reads if place.startswith("slot ")}
    return leavers | set(last.values())
