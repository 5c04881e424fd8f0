"""Units whose next update waits while their present weights and states are being saved.

An update of step N + 1 comes a whole forward and backward after that of step N, so a save of the state after step N has
that long for each unit before anything waits, and needs no copy of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from ..executor.stores import Optimizer, UnitOptimizer
from ..layout import Layout


class HeldUnit:
    """A unit's optimizer that can be held at a step; all else is the optimizer's own."""

    def __init__(self, unit: UnitOptimizer) -> None:
        self._unit = unit
        self._step: int | None = None
        self._free = threading.Event()
        self._free.set()
        self.waited_s = 0.0
        """Seconds for which updates have waited, since the start."""

    @property
    def streamed(self) -> torch.Tensor:
        return self._unit.streamed

    def hold(self, step: int) -> None:
        """Let no update after ``step`` begin until `release`."""
        self._step = step
        self._free.clear()

    def release(self) -> None:
        """Let updates go on."""
        self._free.set()

    def update(self, gradient: torch.Tensor, *, step: int, scale: float, lr: float) -> None:
        if not self._free.is_set() and self._step is not None and step > self._step:
            started = time.perf_counter()
            self._free.wait()
            self.waited_s += time.perf_counter() - started
        self._unit.update(gradient, step=step, scale=scale, lr=lr)

    def master(self) -> torch.Tensor:
        return self._unit.master()

    def state(self) -> Mapping[str, torch.Tensor]:
        return self._unit.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._unit.load_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unit, name)


class HeldOptimizer:
    """An optimizer for `stream` whose units can be held."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def lr(self) -> float:
        return self._optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._optimizer.lr = value

    def unit(self, layout: Layout, weights: torch.Tensor, dtype: torch.dtype, **options: Any) -> HeldUnit:
        return HeldUnit(self._optimizer.unit(layout, weights, dtype, **options))

    def squares(self, gradient: torch.Tensor) -> float:
        return self._optimizer.squares(gradient)

    def clip(self, sum_of_squares: float) -> Any:
        return self._optimizer.clip(sum_of_squares)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)
