"""What layers keep from forward to backward, and its way to the host and back where it is swapped."""

from __future__ import annotations

from .draft import Compute, Draft
from .leaving import Leaving
from .weights import Loads


class Kept:
    """Places swaps, and the memory of what is kept, in the order of compute."""

    def __init__(self, draft: Draft, loads: Loads, leaving: Leaving) -> None:
        self._draft, self._loads, self._leaving = draft, loads, leaving

    def place(self, position: int, compute: Compute) -> None:
        """Hold what a layer's forward keeps until its backward, on the GPU or swapped to the host in between."""
        internals = self._draft.internals(compute)
        if internals == "none":
            return
        size = self._draft.units[compute.unit].kept_bytes(internals)
        swapped = self._draft.policy.layers[compute.unit - self._draft.first].internals_home == "host"
        if compute.kind == "forward":
            self._place_forward(position, compute, size, swapped)
        elif swapped:
            self._place_swap_in(compute, size)

    def _place_forward(self, position: int, compute: Compute, size: int, swapped: bool) -> None:
        draft = self._draft
        released = draft.id("backward", compute.unit, compute.micro)
        if swapped:
            released = draft.transfer(position + 1, "swap_out", "d2h", compute, size, [compute.id])
            self._leaving.begin("swap_out", position, released)
        draft.hold(f"internals.{compute.id}", "gpu", size, compute.id, released)

    def _place_swap_in(self, compute: Compute, size: int) -> None:
        draft = self._draft
        swap_out = draft.id("swap_out", compute.unit, compute.micro)
        forward = draft.position.get(draft.id("forward", compute.unit, compute.micro), -2)
        freed_at = max(self._loads.layers_ago(), forward + 1)
        after = [swap_out, *draft.freed_by(freed_at)]
        swap_in = draft.transfer(freed_at + 1, "swap_in", "h2d", compute, size, after)
        compute.after.append(swap_in)
        draft.hold(f"internals.{swap_in}", "gpu", size, swap_in, compute.id)
        draft.hold(f"internals.{swap_out}", "host", size, swap_out, swap_in)
