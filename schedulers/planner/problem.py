"""One question to the solver: the model, the machine, and what is given and not chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...jobs.model_facts import ModelFacts
from ...jobs.optimizer_bytes import DEFAULT_OPTIMIZER, OptimizerOptions
from ...jobs.policy import Parked, Policy
from ..costs import state_bytes
from ..hardware import Budgets, HardwareProfile
from .parking import NOTHING, Parking, park, spared_bytes

MOST_MICRO_BATCHES: Final = 2
"""Micro-batches that are timed one by one."""
FEW_LAYERS: Final = 16
"""Chains of which the solver needs no help to find good policies, and is asked twice."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is given to the solver, not chosen by it."""

    weight_slots: int = 2
    staging_slots: int = 2
    resident: frozenset[int] = frozenset()
    parked: Parking = NOTHING
    """Layers whose optimizer state or gradient is on NVMe."""


@dataclass(frozen=True)
class Problem:
    """One question to the solver."""

    facts: ModelFacts
    profile: HardwareProfile
    budgets: Budgets
    shape: Shape
    horizon_s: float
    """Only step times up to this one are looked for."""
    longest_block: int = 8
    accumulation: int = 1
    """Micro-batches that are timed one by one."""
    repeats: int = 0
    """Further ones between the first and the last of them, which are timed as the last one."""
    residents: tuple[int, int] = (0, 0)
    """Fewest and most layers that stay on the GPU beside those of the shape, any of them, as the solver likes."""
    parked_bytes: int = 0
    """The most host memory that optimizer state on NVMe gives back, as the solver likes, beside what the shape has."""
    optimizer: OptimizerOptions = DEFAULT_OPTIMIZER
    on_nvme: frozenset[int] | None = None
    """The only layers whose boundaries may be on NVMe; None for all."""

    @property
    def micro_batches(self) -> int:
        """Those of a step."""
        return self.accumulation + self.repeats

    @property
    def state_bytes(self) -> int:
        """Host memory that the model's state takes with nothing on NVMe."""
        return sum(state_bytes(self.facts, accumulation=self.accumulation, optimizer=self.optimizer).values())

    def parked(self, shape: Shape) -> Parked:
        """What a shape has on NVMe beside boundaries."""
        return Parked.of(park(self._plain, self.facts, shape.parked), self.facts)

    def spared_bytes(self, shape: Shape) -> int:
        """Host memory that it gives back, without the buffers that it passes through."""
        return spared_bytes(self._plain, self.facts, shape.parked)

    @property
    def _plain(self) -> Policy:
        made = Policy.from_homes(self.facts, ["gpu"] * (len(self.facts.layers) + 1), accumulation=self.accumulation)
        return made.model_copy(update={"optimizer": self.optimizer})


def sorts_of(facts: ModelFacts) -> tuple[int, ...]:
    """A number for each layer: layers that cost the same in every respect have the same."""
    known: dict[tuple[float, ...], int] = {}
    return tuple(
        known.setdefault(
            (
                layer.forward_flops,
                layer.attention_flops,
                layer.weight_bytes,
                layer.output_bytes,
                layer.saved_bytes,
                layer.saved_matmul_bytes,
                layer.backward_workspace_bytes,
            ),
            len(known),
        )
        for layer in facts.layers
    )
