"""The order of compute: which unit runs when, forward, again and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ...model_facts import ModelFacts
from ..artifact import Policy
from ..order import Order, Phase

ComputeKind = Literal["forward", "loss", "recompute", "backward"]


class Run(NamedTuple):
    """One compute operation."""

    kind: ComputeKind
    unit: int
    micro: int


def compute_order(policy: Policy, facts: ModelFacts, order: Order) -> Iterator[Run]:
    """The compute operations of all phases; the norms have none."""
    passes = {"forward": _forward, "backward": _backward, "evaluate": _evaluation}
    for phase in order:
        if phase.kind in passes:
            yield from passes[phase.kind](policy, facts, phase)


def _forward(policy: Policy, facts: ModelFacts, phase: Phase) -> Iterator[Run]:
    head = len(facts.units) - 1
    for unit in range(head):
        yield Run("forward", unit, phase.micro)
    yield Run("loss", head, phase.micro)


def _evaluation(policy: Policy, facts: ModelFacts, phase: Phase) -> Iterator[Run]:
    for unit in range(len(facts.units)):
        yield Run("forward", unit, phase.micro)


def _backward(policy: Policy, facts: ModelFacts, phase: Phase) -> Iterator[Run]:
    first, head = len(facts.before), len(facts.units) - 1
    for unit in range(head, first + len(facts.layers) - 1, -1):
        yield Run("backward", unit, phase.micro)
    yield from _layers_backward(policy, facts, phase.micro)
    for unit in range(first - 1, -1, -1):
        yield Run("backward", unit, phase.micro)


def _layers_backward(policy: Policy, facts: ModelFacts, micro: int) -> Iterator[Run]:
    """Before the last layer of a block, all boundaries inside the block are made again."""
    first, homes = len(facts.before), policy.homes
    known_from = len(facts.layers)  # boundaries from here on are on the GPU or at their home
    for layer in range(len(facts.layers) - 1, -1, -1):
        if homes[layer] == "recompute" and layer < known_from:
            start = max(i for i in range(layer) if homes[i] != "recompute")
            for inner in range(start, layer):
                yield Run("recompute", first + inner, micro)
            known_from = start + 1
        yield Run("backward", first + layer, micro)
