"""Gradients on their way to the host, where they are added up, parked on NVMe, and their squares summed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from ..parked import RingUses
from ..program import Op
from .draft import Compute, Draft
from .leaving import Leaving

GRADIENT_STAGING = 2
"""Host buffers in which gradients wait to be added to those that came before."""


class Gradients:
    """Places the way of each backward's gradient, in the order of compute; then the norms."""

    def __init__(self, draft: Draft, leaving: Leaving, *, some_there: bool) -> None:
        """``some_there`` says whether the step has gradients already, to which these are to be added."""
        self._draft, self._leaving, self._some_there = draft, leaving, some_there
        self._into: dict[int, list[str]] = defaultdict(list)  # by owner, what each contribution ends with
        self._added: list[str] = []
        self._ring = RingUses()
        self._contributions = Counter(draft.owner[c.unit] for c in draft.computes if c.kind == "backward")

    def after_updates(self, updates: Sequence[Op]) -> None:
        """Parked gradients take their host buffers after those that the updates read them into."""
        labels = [self._draft.labels[op.unit] for op in updates if op.kind == "read_gradient"]
        self._ring = RingUses([f"update.{label}" for label in labels])

    def place(self, position: int, compute: Compute) -> None:
        """Copy a unit's gradient out; all but the first that a master gets are added to what is there."""
        draft = self._draft
        owner, size = draft.owner[compute.unit], draft.units[compute.unit].gradient_bytes
        if compute.kind != "backward" or not size:
            return  # it makes none: nothing of the unit learns
        adds = self._some_there or bool(self._into[owner])
        after = [compute.id]
        if adds and len(self._added) >= GRADIENT_STAGING:
            after.append(self._added[-GRADIENT_STAGING])
        into = self._place_on_host(position, compute, adds)
        after += [] if adds else into
        landed = gradient = draft.transfer(position + 1, "gradient", "d2h", compute, size, after)
        self._leaving.gradients.append(gradient)
        early = compute.unit == draft.head and draft.facts.loss == "chunks"
        made_by = draft.id("loss", compute.unit, compute.micro) if early else compute.id
        draft.hold(gradient, "gpu", size, made_by, gradient)
        if adds:
            landed = draft.transfer(position + 1, "accumulate", "cpu", compute, size, [gradient, *into])
            self._added.append(landed)
        self._into[owner].append(landed)
        if owner in draft.parked.gradients and len(self._into[owner]) < self._contributions[owner]:
            draft.transfer(position + 1, "write_gradient", "nvme_write", compute, self.host_bytes(owner), [landed])

    def _place_on_host(self, position: int, compute: Compute, adds: bool) -> list[str]:
        """What makes a parked gradient's place on the host ready: its buffer's last use, or the read of its sum so far.

        The sum is read while the unit's next contribution is computed.
        """
        draft, owner = self._draft, self._draft.owner[compute.unit]
        if owner not in draft.parked.gradients:
            return []
        empty = self._ring.take(draft.id("write_gradient", compute.unit, compute.micro))
        if not adds:
            return empty
        _, before = self._into[owner][-1].split(".", 1)
        after = [f"write_gradient.{before}", *empty]
        return [draft.transfer(position, "read_gradient", "nvme_read", compute, self.host_bytes(owner), after)]

    def host_bytes(self, owner: int) -> int:
        """Bytes of a gradient on the host: float32 where contributions are added up."""
        facts = self._draft.facts
        elements = self._draft.units[owner].gradient_bytes // facts.element_bytes
        return elements * (4 if self._some_there or self._contributions[owner] > 1 else facts.element_bytes)

    def place_norms(self) -> list[str]:
        """Sum the squares of each master's gradient right after its last contribution has landed; the names."""
        draft, norms = self._draft, []
        landed = {owner: self._into[owner][-1:] for owner in draft.learning}
        at = {owner: draft.placed_at[names[0]] if names else 0 for owner, names in landed.items()}
        for owner in sorted(draft.learning, key=at.__getitem__):
            size = draft.units[owner].gradient_bytes
            norm = Op(f"norm.{draft.labels[owner]}", "norm", "cpu", owner, 0, size, tuple(landed[owner]))
            draft.issue(at[owner], norm)
            norms.append(norm.id)
            if owner in draft.parked.gradients:
                last, size = landed[owner][0].split(".", 1)[1], self.host_bytes(owner)
                written = Op(f"write_gradient.{last}", "write_gradient", "nvme_write", owner, 0, size, (norm.id,))
                draft.issue(at[owner], written)
        return norms
