"""How many whole layers a room holds: what keeps a bound of parts of layers from filling it with halves.

Of layers each of which takes more than an n+1th of the room there are at most n in it, none of those that take more
than all of it; one that takes more than two such parts counts as two, and so on. For one that gives room back there
may be one more, and for each further part of that one more. These are Chvatal-Gomory cuts of the room's inequality, one
for each n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .linear import Model, Variable, fast_sum


class Item(NamedTuple):
    """What one choice of one layer, of which a layer makes at most one, would take."""

    size: float
    layer: int
    chosen: Variable


def add_whole_layers(model: Model, room: float, items: Sequence[Item], layers: int) -> None:
    """``items`` are those of ``layers`` layers; sizes are in the unit of ``room``. One below 0 gives others room."""
    by_layer = _by_layer(items)
    for most in range(layers) if room > 0 else ():
        if sum(max(0, _parts(max(item.size for item in own), room, most + 1)) for own in by_layer) > most:
            numbers = [(_parts(item.size, room, most + 1), item) for item in items]
            model.add_linear_constraint(fast_sum(number * item.chosen for number, item in numbers if number) <= most)
    given = sum(max(0.0, -min(item.size for item in own)) for own in by_layer)
    never = [item.chosen for item in items if item.size > room + given]
    if given and never:
        model.add_linear_constraint(fast_sum(never) <= 0)


def _parts(size: float, room: float, number: int) -> int:
    """How many of ``number`` equal parts of the room are surely full of it; less than 0 where it empties some."""
    parts = size * number / room
    return math.ceil(parts) - 1 if size > 0 else math.floor(parts)


def _by_layer(items: Sequence[Item]) -> list[list[Item]]:
    layers: dict[int, list[Item]] = {}
    for item in items:
        layers.setdefault(item.layer, []).append(item)
    return list(layers.values())
