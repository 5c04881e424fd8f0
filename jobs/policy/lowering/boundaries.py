"""Boundaries that leave the GPU after their layer's forward and come back before its backward.

To the host and back: offload, reload. To NVMe by way of the host: offload, write, read, reload. To NVMe with no stop on
the host, where the policy says so: spill, fetch.
"""

from __future__ import annotations

from ..artifact import Home
from .draft import Compute, Draft
from .leaving import Leaver, Leaving
from .weights import Loads

NVME_STAGING = 2
"""Host buffers through which boundaries pass on their way to NVMe and back."""


class Boundaries:
    """Places offloads, writes, reads and reloads, in the order of compute."""

    def __init__(self, draft: Draft, loads: Loads, leaving: Leaving) -> None:
        self._draft, self._loads, self._leaving = draft, loads, leaving
        self._staged: list[str] = []  # for each use of an NVMe staging buffer, what ends it
        self._staged_at = 0  # they are taken in the order of the program

    def place(self, position: int, compute: Compute) -> None:
        """Move the operation's boundary, if its home is not the GPU."""
        home = self._draft.home(compute.unit)
        if home not in ("host", "nvme") or self._draft.evaluates(compute):
            return
        direct = self._draft.leaves_by(compute.unit) == "spill"
        back = self._draft.id("fetch" if direct else "reload", compute.unit, compute.micro)
        if compute.kind == "forward":
            if direct:
                self._place_spill(position, compute)
            else:
                self._place_offload(position, compute, home)
        elif compute.kind == "recompute" or back not in self._draft.placed_at:
            if direct:
                self._place_fetch(compute)
            else:
                self._place_reload(compute, home)

    def _place_spill(self, position: int, compute: Compute) -> None:
        """Write a boundary from the GPU to NVMe while the layer that reads it computes."""
        draft, size = self._draft, self._draft.boundary_bytes(compute.unit)
        after = draft.freed_by(position - 1)
        spill = draft.transfer(position, "spill", "nvme_write", compute, size, after)
        self._begin("spill", position, compute, spill)

    def _place_fetch(self, compute: Compute) -> None:
        """Read a boundary to the GPU, from NVMe, when it would be reloaded from the host."""
        draft, unit, micro = self._draft, compute.unit, compute.micro
        size, spill = draft.boundary_bytes(unit), draft.id("spill", unit, micro)
        freed_at = max(self._loads.layers_ago(), draft.position.get(draft.id("forward", unit, micro), -1))
        after = [spill, *draft.freed_by(freed_at)]
        fetch = draft.transfer(freed_at + 1, "fetch", "nvme_read", compute, size, after)
        compute.after.append(fetch)
        draft.hold(f"boundary.{fetch}", "gpu", size, fetch, draft.id("backward", unit, micro))
        draft.hold(f"boundary.{spill}", "nvme", size, spill, fetch)

    def _place_offload(self, position: int, compute: Compute, home: Home) -> None:
        """Copy a boundary out while the layer that reads it computes; write it on to NVMe if it lives there."""
        draft, size = self._draft, self._draft.boundary_bytes(compute.unit)
        after = draft.freed_by(position - 1)
        if home == "nvme" and len(self._staged) >= NVME_STAGING:
            after.append(self._staged[-NVME_STAGING])
        offload = draft.transfer(position, "offload", "d2h", compute, size, after)
        self._begin("offload", position, compute, offload)
        if home == "nvme":
            self._staged_at = position
            self._staged.append(draft.transfer(position, "write", "nvme_write", compute, size, [offload]))

    def _place_reload(self, compute: Compute, home: Home) -> None:
        """Bring a boundary back to the GPU as many layers ahead as there are weight slots."""
        draft, unit, micro = self._draft, compute.unit, compute.micro
        size = draft.boundary_bytes(unit)
        forward = draft.position.get(draft.id("forward", unit, micro), -1)
        freed_at = max(self._loads.layers_ago(), forward)
        stored = draft.id("offload", unit, micro)
        if home == "nvme":
            freed_at = max(freed_at, draft.end_of_forward(micro) - 1)
            stored = self._place_read(compute, size)
        at = max(freed_at + 1, draft.placed_at.get(stored, 0))
        reload = draft.transfer(at, "reload", "h2d", compute, size, [stored, *draft.freed_by(freed_at)])
        compute.after.append(reload)
        draft.hold(f"boundary.{reload}", "gpu", size, reload, draft.id("backward", unit, micro))
        if home == "nvme":
            draft.hold(f"boundary.{stored}", "nvme", size, draft.id("write", unit, micro), stored)
        else:
            draft.hold(f"boundary.{stored}", "host", size, stored, reload)

    def _place_read(self, compute: Compute, size: int) -> str:
        """Read into a host staging buffer once the forward is over and a buffer is empty."""
        draft = self._draft
        at, after = draft.end_of_forward(compute.micro), []
        if len(self._staged) >= NVME_STAGING:
            after = [self._staged[-NVME_STAGING]]
            at = max(at, draft.placed_at[after[0]], self._staged_at)
        self._staged_at = at
        write = draft.id("write", compute.unit, compute.micro)
        read = draft.transfer(at, "read", "nvme_read", compute, size, [write, *after])
        self._staged.append(draft.id("reload", compute.unit, compute.micro))
        return read

    def _begin(self, kind: Leaver, position: int, compute: Compute, name: str) -> None:
        """A copy out begins; compute waits for it, unless the boundary is what the model is given, which stays."""
        if compute.unit:
            self._leaving.begin(kind, position, name)
