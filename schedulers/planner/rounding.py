"""How many whole layers a room holds: what keeps a bound of parts of layers from filling it with halves.

Of layers each of which takes more than an n+1th of the room there are at most n in it, none of those that take more
than all of it; one that takes more than two such parts counts as two, and so on. These are Chvatal-Gomory cuts of the
room's inequality, one for each n.
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
    sizes = {layer: [item.size for item in items if item.layer == layer] for layer in {item.layer for item in items}}
    room += sum(max(0.0, -min(own)) for own in sizes.values())
    for most in range(layers) if room > 0 else ():
        part = room / (most + 1)
        counted = [(math.ceil(item.size / part) - 1, item) for item in items if item.size > part]
        largest: dict[int, int] = {}
        for number, item in counted:
            largest[item.layer] = max(largest.get(item.layer, 0), number)
        if sum(largest.values()) > most:
            model.add_linear_constraint(fast_sum(number * item.chosen for number, item in counted) <= most)
