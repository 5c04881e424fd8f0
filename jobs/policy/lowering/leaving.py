"""How many copies out of the GPU may be on their way at once: what they read is held until they have ended."""

from __future__ import annotations

from collections import deque
from typing import Literal

from .draft import Compute, Draft

Leaver = Literal["offload", "spill", "swap_out"]
"""Kinds of copies that take from the GPU what a layer was given or has kept."""


class Leaving:
    """The copies that have begun and that no compute operation has waited for."""

    def __init__(self, draft: Draft) -> None:
        self._slots = draft.policy.staging_slots
        self._begun: dict[Leaver, deque[tuple[int, str]]] = {
            "offload": deque(),
            "spill": deque(),
            "swap_out": deque(),
        }  # by position
        self.gradients: list[str] = []
        """All that were sent off."""

    def begin(self, kind: Leaver, position: int, name: str) -> None:
        """A copy begins before or after the compute operation at ``position``."""
        self._begun[kind].append((position, name))

    def wait(self, position: int, compute: Compute) -> None:
        """What a layer sends away has ``staging_slots`` compute operations to get there.

        Of gradients, which every layer has, ``staging_slots`` may be on their way.
        """
        for queue in self._begun.values():
            while queue and queue[0][0] <= position - self._slots:
                _, name = queue.popleft()
                compute.after.append(name)
        if len(self.gradients) >= self._slots:
            compute.after.append(self.gradients[-self._slots])
