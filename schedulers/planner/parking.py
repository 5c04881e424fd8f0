"""Optimizer state and gradients on NVMe, for hosts that are smaller than the model's state: of how many layers.

What is parked is read from NVMe in every step before the layer's forward. State is written back right away, a gradient
only in backward, when the disk has little else to do but when it may still be at work after all compute has ended. So
the two are counted apart, and no more of either is parked than must be. It is that of the last layers, whose updates
come last and have the longest time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from ...jobs.model_facts import ModelFacts
from ...jobs.optimizer_bytes import OptimizerOptions
from ...jobs.policy import Parked, Policy
from ...jobs.policy.parked import RING, parked_state_bytes
from ..costs import backward_forwards, forward_seconds, gradient_bytes, state_bytes
from ..hardware import HardwareProfile

ROUNDING: Final = 1e-7
"""Share of the missing bytes that may be a solver's inaccuracy."""


class Parking(NamedTuple):
    """How many layers have what on NVMe: the last ones that have any."""

    states: int = 0
    gradients: int = 0
    early: bool = False
    """Whether the states are those of the first layers instead: boundaries are written to NVMe after all states."""

    @classmethod
    def of(cls, policy: Policy, facts: ModelFacts) -> Parking:
        """That of a policy of the planner's."""
        layers = [policy.layers[i] for i in parkable_layers(facts)]
        states = [layer.optimizer_home == "nvme" for layer in layers]
        gradients = sum(layer.gradient_home == "nvme" for layer in layers)
        return cls(sum(states), gradients, early=any(states) and not states[-1])


NOTHING: Final = Parking()
"""All state and every gradient on the host."""


class Parkable(NamedTuple):
    """Bytes of each layer that could be parked, in the order of the layers."""

    states: tuple[int, ...]
    gradients: tuple[int, ...]


def parkable_layers(facts: ModelFacts) -> list[int]:
    """Layers that have optimizer state of their own to put on NVMe."""
    own = ((i, layer) for i, layer in enumerate(facts.layers) if layer.gradient_bytes)
    return [i for i, layer in own if not layer.shares_weights_with]


def parkable(facts: ModelFacts, optimizer: OptimizerOptions, accumulation: int = 1) -> Parkable:
    """What could be parked of a step of ``accumulation`` micro-batches."""
    gradients, first = gradient_bytes(facts, accumulation), len(facts.before)
    layers = parkable_layers(facts)
    return Parkable(
        tuple(parked_state_bytes(facts.layers[i], facts, optimizer) for i in layers),
        tuple(gradients[first + i] for i in layers),
    )


def park(policy: Policy, facts: ModelFacts, parking: Parking) -> Policy:
    """The policy with state and gradients of so many of the layers that have any on NVMe."""
    layers = parkable_layers(facts)
    last = max(0, len(layers) - parking.states)
    states = layers[: parking.states] if parking.early else layers[last:]
    gradients = layers[max(0, len(layers) - parking.gradients) :]
    return policy.parked(optimizer=states, gradients=gradients) if states or gradients else policy


def ring_bytes(policy: Policy, facts: ModelFacts) -> int:
    """Host buffers through which what is parked passes."""
    parked, gradients = Parked.of(policy, facts), gradient_bytes(facts, policy.accumulation)
    rings = (list(parked.state.values()), [gradients[unit] for unit in parked.gradients])
    return sum(min(RING, len(sizes)) * max(sizes, default=0) for sizes in rings)


def spared_bytes(policy: Policy, facts: ModelFacts, parking: Parking) -> int:
    """Host memory that it gives back; ``policy`` has nothing parked of its own."""
    parked = park(policy, facts, parking)
    spared = sum(state_bytes(facts, policy).values()) - sum(state_bytes(facts, parked).values())
    return spared - ring_bytes(parked, facts)


def most_spared_bytes(sizes: Parkable) -> int:
    """Host memory that parking gives back at most, whichever layers' it is."""
    return sum(max(0, sum(kind) - RING * min(kind, default=0)) for kind in sizes)


def quickest_parking(
    policy: Policy, facts: ModelFacts, profile: HardwareProfile, missing_bytes: int, boundaries: int = 0
) -> Parking | None:
    """The parking that gives back so much host memory in the least time; None if even all of it does not.

    The time is an estimate, as if reads and forward, then writes and backward, were all that there is. With so many
    ``boundaries`` on NVMe, which are written after the states, these are early, and the forward goes on behind them.
    """
    if missing_bytes <= 0:
        return NOTHING
    sizes = parkable(facts, policy.optimizer, policy.accumulation)
    missing_bytes = math.floor(missing_bytes * (1 - ROUNDING))
    spared = Parkable(*(tuple(_spared(kind)) for kind in sizes))
    enough = [
        Parking(states, gradients, early=boundaries > 0)
        for gradients, given in enumerate(spared.gradients)
        if (states := _fewest(spared.states, missing_bytes - given)) is not None
    ]
    lasts = _estimate(facts, profile, sizes, policy.accumulation, boundaries)
    return min(enough, key=lambda parking: (lasts(parking), parking.gradients), default=None)


def _spared(sizes: Sequence[int]) -> list[int]:
    """Host memory that parking the last 0, 1, 2, ... of ``sizes`` gives back."""
    last = sizes[::-1]
    totals, largest = accumulate(last, initial=0), accumulate(last, max, initial=0)
    return [total - min(RING, k) * most for k, (total, most) in enumerate(zip(totals, largest, strict=True))]


def _fewest(spared: Sequence[int], missing_bytes: int) -> int | None:
    return next((number for number, given in enumerate(spared) if given >= missing_bytes), None)


def _estimate(
    facts: ModelFacts, profile: HardwareProfile, sizes: Parkable, accumulation: int, boundaries: int
) -> Callable[[Parking], float]:
    """A function of the seconds that a step takes with a parking."""
    forwards = [(forward_seconds(layer, facts, profile), backward_forwards(layer, profile)) for layer in facts.layers]
    forward_s = sum(seconds for seconds, _ in forwards)
    rest_s = (accumulation - 1) * forward_s + accumulation * sum((1 + back) * seconds for seconds, back in forwards)
    read, write = profile.nvme_read_bytes_s, profile.nvme_write_bytes_s
    written_s = boundaries * max(forward_s / len(forwards), max(facts.boundary_bytes) / write)

    def lasts(parking: Parking) -> float:
        states, gradients = (sum(kind[len(kind) - n :]) for kind, n in zip(sizes, parking[:2], strict=True))
        before = len(sizes.gradients) - parking.gradients  # layers whose gradient is on the host
        early = (states + sum(sizes.gradients[before : parking.states])) / read if parking.early else 0.0
        first = max(forward_s, (states + gradients) / read, states / write, early + written_s)
        again = (accumulation - 1) * gradients / read
        return first + max(rest_s, again, accumulation * gradients / write)

    return lasts
