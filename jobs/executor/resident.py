"""All weights on the device at once, where they fit: for generation, which would else carry them there every token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .devices import CpuDevice, EmulatedDevice
from .streamed import Streamed


@contextmanager
def resident(streamed: Streamed) -> Iterator[None]:
    """While entered, the model's own code runs on weights that stay on the device; nothing is streamed or updated.

    On the plain CPU these are the host's own. Raises the device's OutOfMemory when there is no room; nothing has
    changed then.
    """
    streamed.flush()
    engine = streamed._engine
    owners = [engine.units[engine.weights_owner(index)] for index in range(len(engine.units))]
    with streamed.device.counting():
        copies = {id(owner): _on_device(streamed, owner.weights.streamed) for owner in owners}
        try:
            for unit, owner in zip(engine.units, owners, strict=True):
                unit.bind(copies[id(owner)])
            with streamed._standins.stepped_aside():
                yield
        finally:
            for unit in engine.units:
                unit.unbind(streamed.device.torch_device)


def _on_device(streamed: Streamed, weights: torch.Tensor) -> torch.Tensor:
    device = streamed.device
    if isinstance(device, CpuDevice) and not isinstance(device, EmulatedDevice):
        return weights
    held = device.empty(weights.numel(), weights.dtype)
    held.copy_(weights)
    return held
