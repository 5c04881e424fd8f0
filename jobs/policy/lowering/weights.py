"""Loads of weights: into the ring of slots, into the slots of residents, into memory of their own."""

from __future__ import annotations

from ..program import Op
from .draft import Compute, Draft

HEAD_AHEAD = 3
"""Units after the layers are loaded this many operations ahead in forward, so that the head comes under a layer."""
_LOAD_PHASE = {"forward": "", "loss": "", "recompute": ".r", "backward": ".b"}


class Loads:
    """Places the load of each compute operation, in their order."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        slots = draft.policy.weight_slots
        self._ring: list[tuple[int, int]] = [(-1, -1)] * slots  # unit held, last position that used it
        self._recent: dict[int, int] = {}  # the layers used last, oldest first, and the position of that use
        resident = [draft.first + layer.index for layer in draft.policy.layers if layer.resident]
        self.resident = {unit: slots + i for i, unit in enumerate(resident)}
        """Units whose weights stay, and their own slots."""
        self._loaded: dict[int, str] = {}  # residents, and what loaded them

    def place(self, position: int, compute: Compute) -> None:
        """Have the unit's weights on the GPU for the operation."""
        draft, unit = self._draft, self._draft.units[compute.unit]
        if compute.kind == "backward" and compute.unit == draft.head:
            return  # the loss made the head's gradients; backward only scales them
        if unit.kind != "layer":
            self._place_own(position, compute)
        elif compute.unit in self.resident:
            self._place_resident(compute)
        else:
            self._place_in_ring(position, compute)

    def _place_own(self, position: int, compute: Compute) -> None:
        draft, unit = self._draft, self._draft.units[compute.unit]
        ahead = HEAD_AHEAD if compute.kind != "backward" and unit.kind != "before" else 2
        load = self._load(compute, at=position - ahead + 1, freed_by=position - ahead)
        kept = compute.kind == "loss" and draft.facts.loss == "whole"  # for a backward that autograd does
        last = draft.id("backward", compute.unit, compute.micro) if kept else compute.id
        draft.hold(f"weights.{load}", "gpu", unit.weight_bytes, load, last)

    def _place_resident(self, compute: Compute) -> None:
        compute.slot = self.resident[compute.unit]
        if compute.unit in self._loaded:
            compute.after.append(self._loaded[compute.unit])
        else:
            self._loaded[compute.unit] = self._load(compute, at=min(used for _, used in self._ring) + 1)

    def _place_in_ring(self, position: int, compute: Compute) -> None:
        held = [s for s, (holds, _) in enumerate(self._ring) if holds == compute.unit]
        compute.slot = held[0] if held else min(range(len(self._ring)), key=lambda s: self._ring[s][1])
        if not held:
            used = self._ring[compute.slot][1]
            self._load(compute, at=used + 1, freed_by=used)
        self._ring[compute.slot] = (compute.unit, position)

    def _load(self, compute: Compute, *, at: int, freed_by: int = -1) -> str:
        """Load weights before the compute operation at ``at``, when the one at ``freed_by`` has left their buffer."""
        draft = self._draft
        label, owner = draft.labels[compute.unit], draft.owner[compute.unit]
        after = [f"update.{draft.labels[owner]}"] if draft.units[owner].gradient_bytes else []
        after += draft.freed_by(freed_by)
        name = f"load.{label}{_LOAD_PHASE[compute.kind]}@{compute.micro}"
        size = draft.units[compute.unit].weight_bytes
        draft.issue(max(0, at), Op(name, "load", "h2d", compute.unit, compute.micro, size, tuple(after), compute.slot))
        compute.after.append(name)
        return name

    def remember(self, position: int, compute: Compute) -> None:
        """Note a layer's use, and forget the one that was used longest ago beyond ``weight_slots``."""
        if self._draft.units[compute.unit].kind == "layer":
            self._recent.pop(compute.unit, None)
            self._recent[compute.unit] = position
            if len(self._recent) > self._draft.policy.weight_slots:
                del self._recent[next(iter(self._recent))]

    def layers_ago(self) -> int:
        """Position of the last use of the layer used ``weight_slots`` layers ago; -1 if there were fewer."""
        return next(iter(self._recent.values())) if len(self._recent) == self._draft.policy.weight_slots else -1
