"""Where weights lie on the device: a ring of layer-sized slots, slots of resident layers, buffers of other units."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..model_facts import ModelFacts
from ..policy import Op, Policy
from .devices import Device
from .stores import HostUnit


class DeviceWeights:
    """Gives loads their targets, and binds units to what was loaded while they compute."""

    def __init__(self, facts: ModelFacts, policy: Policy, units: Sequence[HostUnit], device: Device) -> None:
        self._units, self._device, self._head = units, device, len(units) - 1
        layers = units[len(facts.before) :][: len(facts.layers)]
        resident = [layers[layer.index] for layer in policy.layers if layer.resident]
        largest = max(layer.layout.numel for layer in layers)
        self._sizes = [largest] * policy.weight_slots + [layer.layout.numel for layer in resident]
        self._dtype = layers[0].dtype
        self._slots: list[torch.Tensor] = []
        self.take()

    def take(self) -> None:
        """Take the slots' memory. Raises OutOfMemory; nothing is held then."""
        self.close()
        try:
            for numel in self._sizes:
                self._slots.append(self._device.empty(numel, self._dtype))
        except BaseException:
            self.close()
            raise
        for slot in self._slots:
            slot.fill_(float("nan"))  # a layer that reads before its load has ended is seen at once

    def clear(self) -> None:
        """Forget what lies outside the slots (a step begins or was given up)."""
        self._own: dict[int, deque[torch.Tensor]] = defaultdict(deque)  # by unit, in the order of its uses
        self._waiting: dict[int, torch.Tensor] = {}  # the head's by micro-batch, until its backward

    def close(self) -> None:
        """Give the memory back; `take` takes it again."""
        self.clear()
        self._slots.clear()

    def target(self, op: Op, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Where a load puts its weights: its slot, or memory of its own."""
        if op.slot >= 0:
            return self._slots[op.slot][:numel]
        self._own[op.unit].append(self._device.empty(numel, dtype))
        return self._own[op.unit][-1]

    def slot(self, index: int) -> torch.Tensor:
        """A slot's memory."""
        return self._slots[index]

    def forget_loaded(self) -> None:
        """What was loaded ahead, outside the slots, will be loaded again."""
        self._own.clear()

    def keep_for_head(self, micro: int, flat: torch.Tensor) -> None:
        """Hold the head's weights until the backward of a micro-batch."""
        self._waiting[micro] = flat

    def drop_for_head(self, micro: int) -> None:
        """That backward will not come."""
        self._waiting.pop(micro, None)

    @contextmanager
    def bound(self, op: Op) -> Iterator[torch.Tensor]:
        """Bind the unit's parameters to the memory its weights were loaded into, and give that.

        Raises ProgramError at the end where somebody has written into a parameter.
        """
        unit = self._units[op.unit]
        flat = self._loaded(op)
        unit.bind(flat)
        try:
            yield flat
            unit.check_unwritten()
        finally:
            unit.unbind(self._device.torch_device)

    def _loaded(self, op: Op) -> torch.Tensor:
        if op.slot >= 0:
            return self._slots[op.slot]
        if op.kind == "backward" and op.unit == self._head:
            return self._waiting.pop(op.micro)
        return self._own[op.unit].popleft()
