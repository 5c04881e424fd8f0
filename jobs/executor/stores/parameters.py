"""One unit's weights and gradient on the host, which owns them; the GPU only ever holds a copy of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import nn

from ...errors import ProgramError
from ...layout import Layout
from ..devices import Device
from .parked import MovableOptimizer, ParkedOptimizer
from .scratch import ScratchFile


class UnitOptimizer(Protocol):
    """Master weights and optimizer state of one unit (`jobs.optim` has the implementation)."""

    streamed: torch.Tensor
    """Flat weights in the compute dtype, in memory that never moves: what crosses the link."""

    def update(self, gradient: torch.Tensor, *, step: int, scale: float, lr: float) -> None:
        """Apply ``scale`` x ``gradient`` (flat)."""

    def master(self) -> torch.Tensor:
        """Flat float32 weights, exact."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """All that is needed to go on bit for bit."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up a saved state. Raises CheckpointError if it is not of this unit."""


class Clip(Protocol):
    """What clipping decided."""

    norm: float
    scale: float
    finite: bool


class Optimizer(Protocol):
    """Makes the optimizer of each unit, and clips."""

    lr: float

    def unit(self, layout: Layout, weights: torch.Tensor, dtype: torch.dtype) -> UnitOptimizer:
        """Take over a unit's flat float32 weights."""

    def squares(self, gradient: torch.Tensor) -> float:
        """Sum of the squares of a flat gradient."""

    def clip(self, sum_of_squares: float) -> Any:
        """A `Clip` for the whole model."""


class FixedWeights:
    """Weights that are never updated: inference, and gradients without an optimizer."""

    def __init__(self, weights: torch.Tensor, dtype: torch.dtype) -> None:
        self.streamed = weights.to(dtype)

    def update(self, gradient: torch.Tensor, *, step: int, scale: float, lr: float) -> None:
        """Nothing to do."""

    def master(self) -> torch.Tensor:
        return self.streamed.float()

    def state(self) -> dict[str, torch.Tensor]:
        return {"streamed": self.streamed}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.streamed.copy_(state["streamed"])


class HostUnit:
    """A unit's parameters as one flat buffer on the host, with its gradient beside it."""

    def __init__(
        self,
        name: str,
        path: str,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        optimizer: Optimizer | None,
        owner: HostUnit | None = None,
    ) -> None:
        """``parameters`` are named inside ``path``; ``owner`` is the unit that holds this one's (tied) weights."""
        self.name, self.path, self.dtype = name, path, dtype
        self.parameters = dict(parameters)
        self.gradient: torch.Tensor | None = None
        self.weights: UnitOptimizer
        self.layout: Layout
        if owner is not None:
            self.layout, self.weights = owner.layout, owner.weights
            return
        layout = self.layout = Layout.of({n: tuple(p.shape) for n, p in self.parameters.items()})
        flat = torch.zeros(layout.numel, dtype=torch.float32)
        for segment in layout.segments:
            flat[segment.offset : segment.offset + segment.numel] = self.parameters[segment.name].data.reshape(-1)
        self.weights = (
            optimizer.unit(self._without_decay_of_frozen(), flat, dtype) if optimizer else FixedWeights(flat, dtype)
        )

    def _without_decay_of_frozen(self) -> Layout:
        """The layout for the optimizer, which lets vectors without a gradient be: so frozen matrices are vectors."""
        frozen = {name for name, parameter in self.parameters.items() if not parameter.requires_grad}
        segments = [replace(s, shape=(s.numel,)) if s.name in frozen else s for s in self.layout.segments]
        return replace(self.layout, segments=tuple(segments))

    def gradient_buffer(self, device: Device, contributions: int) -> torch.Tensor:
        """The host's gradient: float32 where several contributions are added up, the compute dtype otherwise."""
        dtype = torch.float32 if contributions > 1 else self.dtype
        if self.gradient is None or self.gradient.dtype != dtype:
            self.gradient = device.host_empty(self.layout.numel, dtype).zero_()
        return self.gradient

    def park(self, file: ScratchFile) -> None:
        """Move the optimizer's state to NVMe. Raises ProgramError for an optimizer whose state cannot be moved."""
        if not hasattr(self.weights, "keep_in"):
            raise ProgramError(
                f"the policy keeps the optimizer state of {self.name} on NVMe, "
                f"but {type(self.weights).__name__} keeps its state to itself",
                hint="use HybridAdamW, or plan with optimizer_home host",
            )
        self.weights = ParkedOptimizer(cast(MovableOptimizer, self.weights), file)

    @property
    def host_bytes(self) -> int:
        """Host memory of weights and optimizer state."""
        if isinstance(self.weights, ParkedOptimizer):
            return self.weights.streamed.nbytes
        return sum(tensor.nbytes for tensor in self.weights.state().values())

    def bind(self, flat: torch.Tensor) -> None:
        """Make the module's parameters views into ``flat``, its weights on the device."""
        for segment in self.layout.segments:
            view = flat[segment.offset : segment.offset + segment.numel].view(segment.shape)
            self.parameters[segment.name].data = view

    def unbind(self, device: torch.device) -> None:
        """Give the module's parameters no memory, so that a use outside its turn fails at once."""
        for parameter in self.parameters.values():
            parameter.data = torch.empty(0, dtype=self.dtype, device=device)

    def receive(self, gradients: Mapping[str, torch.Tensor | None], into: torch.Tensor, device: Device) -> None:
        """Copy gradients, by parameter name, to their places in a flat host tensor; None is zero, padding too."""
        for segment in self.layout.segments:
            into[segment.offset + segment.numel : segment.end] = 0
            part = into[segment.offset : segment.offset + segment.numel]
            gradient = gradients[segment.name]
            if gradient is None:
                part.zero_()
            else:
                device.copy(part.view(segment.shape), gradient)

    def named(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a flat tensor of this unit by full parameter name."""
        prefix = f"{self.path}." if self.path else ""
        return {f"{prefix}{s.name}": flat[s.offset : s.offset + s.numel].view(s.shape) for s in self.layout.segments}
