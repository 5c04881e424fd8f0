"""Waits for swapped internals, counted: implied by the timing for whole choices, and what makes a bound of parts tight.

Internals that are swapped have the compute of a few layers to hide behind; what is longer stalls the layer that waits
for them. A path through the program can go through every such copy: from one it goes on to the next, or along compute,
and of what it skips no layer is skipped twice, nor more layers than the copies hide behind one by one.
"""

from __future__ import annotations

from typing import Final

from ...jobs.model_facts import Internals, UnitFacts
from ..costs import backward_forwards, forward_seconds
from .choices import Choices
from .linear import fast_sum
from .variables import KEPT, Term

KINDS: Final[tuple[Internals, ...]] = ("none", *KEPT)
"""What can be kept of a layer."""


def add_forward_stalls(choices: Choices, scale: float, ends: list[Term], staging_slots: int) -> None:
    """``ends`` are the ends of the layers' forwards; a layer waits for what the one ``staging_slots`` before sent off.

    ``scale`` turns seconds into the model's unit of time.
    """
    forwards = [_forward_s(choices, layer) * scale for layer in choices.facts.layers]
    hidden = (staging_slots - 1) * max(forwards)
    rate, seen = choices.problem.profile.d2h_bytes_s / scale, range(max(0, len(forwards) - staging_slots))
    stalls = _stalls(choices, seen, rate, hidden)
    choices.model.add_linear_constraint(ends[-1] >= ends[0] + fast_sum([*forwards[1:], *stalls]))


def add_backward_stalls(choices: Choices, scale: float, ends: list[Term], slots: int, *, with_weights: bool) -> None:
    """``ends`` are the ends of the layers' backwards, the last layer first.

    A layer's internals, and its weights before them, are sent for when the backward ``slots`` layers above is over. The
    layers between are taken to last as long as one of which this or that is kept; those that last longer say so.
    """
    layers = choices.facts.layers
    rate, seen = choices.problem.profile.h2d_bytes_s / scale, range(max(0, len(layers) - 1 - slots))
    own = [_backward(choices, i, scale) for i in range(len(layers) - 1)]
    for kept in KINDS:
        between = max(_backward_s(choices, layer, kept) for layer in layers) * scale
        stalls = _stalls(choices, seen, rate, (slots - 1) * between, with_weights=with_weights)
        if not stalls:
            continue
        longer = [_beyond(choices, i, scale, between) for i in range(1, len(layers) - 1)]
        total = fast_sum([*own, *stalls]) - fast_sum(longer)
        choices.model.add_linear_constraint(ends[-1] >= ends[0] + total)


def _stalls(choices: Choices, seen: range, rate: float, hidden: float, *, with_weights: bool = False) -> list[Term]:
    """How much longer than ``hidden`` the copies of these layers' internals take, where they are swapped."""
    stalls = []
    for i in seen:
        unit = choices.facts.layers[i]
        beside = unit.weight_bytes if with_weights else 0
        for (_, kept, home), variable in choices.kept_of(i):
            longer = (unit.kept_bytes(kept) + beside) / rate - hidden
            if home == "host" and longer > 0:
                stalls.append(longer * variable)
    return stalls


def _backward(choices: Choices, i: int, scale: float) -> Term:
    """The time of a layer's backward, whatever is kept of it."""
    layer = choices.facts.layers[i]
    none = _backward_s(choices, layer, "none")
    spared = [
        (none - _backward_s(choices, layer, kept)) * scale * variable for (_, kept, _), variable in choices.kept_of(i)
    ]
    return none * scale - fast_sum(spared)


def _beyond(choices: Choices, i: int, scale: float, between: float) -> Term:
    """By how much a layer's backward is longer than ``between``."""
    layer = choices.facts.layers[i]
    beyond = max(0.0, _backward_s(choices, layer, "none") * scale - between)
    spared = [
        (beyond - max(0.0, _backward_s(choices, layer, kept) * scale - between)) * variable
        for (_, kept, _), variable in choices.kept_of(i)
    ]
    return beyond - fast_sum(spared)


def _forward_s(choices: Choices, layer: UnitFacts) -> float:
    """Seconds of a layer's forward."""
    profile = choices.problem.profile
    return forward_seconds(layer, choices.facts, profile) + profile.operation_overhead_s


def _backward_s(choices: Choices, layer: UnitFacts, kept: Internals) -> float:
    """Seconds of a layer's backward, with the part of its forward that was not kept."""
    profile = choices.problem.profile
    forwards = profile.reforward(kept) + backward_forwards(layer, profile)
    return forwards * forward_seconds(layer, choices.facts, profile) + profile.operation_overhead_s
