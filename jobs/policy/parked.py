"""Optimizer state and gradients that live on NVMe: their bytes, their host buffers, and their part of the program.

A layer's update then reads its state (low halves of the master, m, v), works on it, and writes it back, through a ring
of host buffers, while the reads for the next layers go on:

    nvme_read   state.0 gradient.0   state.1 gradient.1   state.2 ...
    cpu                              update.0             update.1
    nvme_write                                  state.0                state.1

A gradient is written right after its norm was taken; with several contributions (micro-batches, layers that share
weights) what was added up so far is read back before each further one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..model_facts import ModelFacts, UnitFacts
from ..optimizer_bytes import OptimizerOptions
from .artifact import Policy
from .program import Op

RING: Final = 3
"""Host buffers of each ring: one being read, one being worked on, one being written."""
_BLOCK: Final = 4096


@dataclass(frozen=True)
class Parked:
    """What one policy keeps on NVMe beside boundaries, by index of the unit; a frozen layer has nothing there."""

    state: Mapping[int, int]
    """Bytes of each unit's optimizer state on NVMe."""
    gradients: frozenset[int]

    @classmethod
    def of(cls, policy: Policy, facts: ModelFacts, state_bytes: Mapping[int, int] | None = None) -> Parked:
        """``state_bytes`` are the true ones; without them those of the policy's optimizer are reckoned."""

        def reckoned(unit: UnitFacts) -> int:
            return parked_state_bytes(unit, facts, policy.optimizer)

        first, known = len(facts.before), state_bytes or {}
        learning = [layer for layer in policy.layers if facts.layers[layer.index].gradient_bytes]
        with_state = [first + layer.index for layer in learning if layer.optimizer_home == "nvme"]
        state = {unit: known.get(unit, reckoned(facts.units[unit])) for unit in with_state}
        return cls(state, frozenset(first + layer.index for layer in learning if layer.gradient_home == "nvme"))


def parked_state_bytes(unit: UnitFacts, facts: ModelFacts, optimizer: OptimizerOptions) -> int:
    """Bytes of a unit's master and states beside the weights that stream to the GPU."""
    each = optimizer.bytes_per_parameter(facts.element_bytes, unit.name)
    learning = unit.gradient_bytes / facts.element_bytes
    return math.ceil(learning * (each["master"] + each["optimizer_state"]))


def blocks(nbytes: int) -> int:
    """``nbytes`` rounded up to whole blocks of the disk."""
    return -(-nbytes // _BLOCK) * _BLOCK


class RingUses:
    """Each use of a ring's buffer waits for what ends the use of the same buffer before."""

    def __init__(self, ends: Sequence[str] = ()) -> None:
        self.ends = list(ends)

    def take(self, end: str) -> list[str]:
        """What the next use waits for; ``end`` is the operation that will end it."""
        self.ends.append(end)
        return [self.ends[-1 - RING]] if len(self.ends) > RING else []


def update_phase(
    parked: Parked,
    owned: Sequence[int],
    labels: Sequence[str],
    sizes: Sequence[int],
    gradient_bytes: Callable[[int], int],
) -> list[Op]:
    """The updates of the units ``owned``, with the reads and writes of what is parked, in the order of the forward.

    ``sizes`` are each unit's streamed bytes, ``gradient_bytes`` gives those of its gradient on the host.
    """
    states, gradients = RingUses(), RingUses()
    waiting = [unit for unit in owned if unit in parked.state or unit in parked.gradients]
    ops: list[Op] = []

    def read(unit: int) -> None:
        label = labels[unit]
        if unit in parked.state:
            after = tuple(states.take(f"write_state.{label}"))
            ops.append(
                Op(f"read_state.{label}", "read_state", "nvme_read", unit, bytes=parked.state[unit], after=after)
            )
        if unit in parked.gradients:
            after, size = tuple(gradients.take(f"update.{label}")), gradient_bytes(unit)
            ops.append(Op(f"read_gradient.{label}", "read_gradient", "nvme_read", unit, bytes=size, after=after))

    for unit in waiting[:RING]:
        read(unit)
    ahead = iter(waiting[RING:])
    for unit in owned:
        after = tuple(op.id for op in ops if op.unit == unit)
        ops.append(Op(f"update.{labels[unit]}", "update", "cpu", unit, bytes=sizes[unit], after=after))
        if unit in parked.state:
            update, size = ops[-1].id, parked.state[unit]
            ops.append(
                Op(f"write_state.{labels[unit]}", "write_state", "nvme_write", unit, bytes=size, after=(update,))
            )
        if unit in waiting and (following := next(ahead, None)) is not None:
            read(following)
    return ops
