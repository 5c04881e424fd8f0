"""Optimizer state on NVMe, for hosts that are smaller than the model's state: how many layers, and what it gives back.

A parked layer is read from NVMe and written back in every step. So no more of them are parked than must be; it is the
last ones, whose updates come last and have the longest time.
"""

from __future__ import annotations

from ...jobs.model_facts import ModelFacts
from ...jobs.optimizer_bytes import OptimizerOptions
from ...jobs.policy import Parked, Policy
from ...jobs.policy.parked import RING, parked_state_bytes
from ..costs import gradient_bytes, state_bytes


def parkable(facts: ModelFacts) -> list[int]:
    """Layers that have optimizer state of their own to put on NVMe."""
    own = ((i, layer) for i, layer in enumerate(facts.layers) if layer.gradient_bytes)
    return [i for i, layer in own if not layer.shares_weights_with]


def park_last(policy: Policy, facts: ModelFacts, number: int) -> Policy:
    """The policy with optimizer state and gradient of the last ``number`` layers that have any on NVMe."""
    last = parkable(facts)[-number:] if number else []
    return policy.parked(optimizer=last, gradients=last) if last else policy


def ring_bytes(policy: Policy, facts: ModelFacts) -> int:
    """Host buffers through which what is parked passes."""
    parked, gradients = Parked.of(policy, facts), gradient_bytes(facts, policy.accumulation)
    rings = (list(parked.state.values()), [gradients[unit] for unit in parked.gradients])
    return sum(min(RING, len(sizes)) * max(sizes, default=0) for sizes in rings)


def least_ring_bytes(facts: ModelFacts, optimizer: OptimizerOptions) -> int:
    """Parked bytes that only make up for the buffers, whatever is parked: `RING` layers fill them."""
    return RING * min((state + gradient for state, gradient in _parts(facts, optimizer)), default=0)


def least_gradient_share(facts: ModelFacts, optimizer: OptimizerOptions) -> float:
    """The part of parked bytes that are gradients, at least."""
    return min((gradient / (state + gradient) for state, gradient in _parts(facts, optimizer)), default=0.0)


def _parts(facts: ModelFacts, optimizer: OptimizerOptions) -> list[tuple[int, int]]:
    """Bytes of state and gradient of each layer that could be parked, with one contribution to each gradient."""
    gradients, first = gradient_bytes(facts), len(facts.before)
    layers = [(first + i, facts.layers[i]) for i in parkable(facts)]
    return [(parked_state_bytes(layer, facts, optimizer), gradients[unit]) for unit, layer in layers]


def spared_bytes(policy: Policy, facts: ModelFacts, number: int) -> int:
    """Host memory that parking ``number`` layers gives back; ``policy`` has none of its own."""
    parked = park_last(policy, facts, number)
    spared = sum(state_bytes(facts, policy).values()) - sum(state_bytes(facts, parked).values())
    return spared - ring_bytes(parked, facts)


def fewest_parked(policy: Policy, facts: ModelFacts, missing_bytes: int) -> int | None:
    """The fewest layers that give back so much host memory; None if all of them do not."""
    if missing_bytes <= 0:
        return 0
    few, many = 0, len(parkable(facts))
    if spared_bytes(policy, facts, many) < missing_bytes:
        return None
    while few + 1 < many:
        middle = (few + many) // 2
        few, many = (few, middle) if spared_bytes(policy, facts, middle) >= missing_bytes else (middle, many)
    return many
