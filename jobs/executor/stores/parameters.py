"""One unit's weights and gradient on the host, which owns them; the GPU only ever holds a copy of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import nn

from ...errors import ProgramError
from ...layout import Layout
from ...memory import unseen
from ..buffers import Buffers
from ..devices import Device
from .parked import MovableOptimizer, ParkedOptimizer
from .scratch import ScratchFile

NOTED_VERSION = "_noted_version"
"""Attribute of a parameter: torch's version of it when nobody had written where its values are not."""


class UnitOptimizer(Protocol):
    """Master weights and optimizer state of one unit (`jobs.optim` has the implementation)."""

    streamed: torch.Tensor
    """Flat weights in the compute dtype, in memory that does not move during training: what crosses the link."""

    def update(self, gradient: torch.Tensor, *, step: int, scale: float, lr: float) -> None:
        """Apply ``scale`` x ``gradient`` (flat)."""

    def master(self) -> torch.Tensor:
        """Flat float32 weights, exact."""

    def load_master(self, weights: torch.Tensor, offset: int = 0) -> None:
        """Take these weights, flat, of any floating dtype, from element ``offset`` on; states stay as they are."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """All that is needed to go on bit for bit."""

    def state_beside_streamed(self) -> Mapping[str, torch.Tensor]:
        """``state()`` without the streamed weights, for when the model's own file has them."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up what ``state()`` or ``state_beside_streamed()`` gave; CheckpointError if it is not of this unit."""


class Clip(Protocol):
    """What clipping decided."""

    norm: float
    scale: float
    finite: bool


class Optimizer(Protocol):
    """Makes the optimizer of each unit, and clips."""

    lr: float
    param_groups: list[dict[str, Any]]
    """One group, with the options of every update."""

    def unit(
        self, layout: Layout, weights: torch.Tensor | None, dtype: torch.dtype, *, path: str = ""
    ) -> UnitOptimizer:
        """Take over a unit's flat float32 weights; ``path`` goes before the layout's names.

        Without ``weights`` they are zero, until `UnitOptimizer.load_master` brings them piece by piece.
        """

    def squares(self, gradient: torch.Tensor) -> float:
        """Sum of the squares of a flat gradient."""

    def clip(self, sum_of_squares: float) -> Any:
        """A `Clip` for the whole model."""


class FixedWeights:
    """Weights that are never updated: frozen ones, inference, and gradients without an optimizer."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        """Zeros, until `load_master` brings the weights."""
        self.streamed = torch.zeros(numel, dtype=dtype)

    def update(self, gradient: torch.Tensor, *, step: int, scale: float, lr: float) -> None:
        """Nothing to do."""

    def master(self) -> torch.Tensor:
        return self.streamed.float()

    def load_master(self, weights: torch.Tensor, offset: int = 0) -> None:
        self.streamed[offset : offset + weights.numel()] = weights

    def state(self) -> dict[str, torch.Tensor]:
        return {"streamed": self.streamed}

    def state_beside_streamed(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if "streamed" in state:
            self.streamed.copy_(state["streamed"])


class PartlyFrozen:
    """A unit whose first weights learn and whose rest is frozen. Its state is that of what learns."""

    def __init__(self, learning: UnitOptimizer, frozen: int) -> None:
        """``frozen`` counts elements, zero until `load_master`; one buffer holds both, so that one load brings both."""
        self._learning, self._first = learning, learning.streamed.numel()
        both = torch.zeros(self._first + frozen, dtype=learning.streamed.dtype)
        both[: self._first] = learning.streamed
        self.streamed = both

    @property
    def streamed(self) -> torch.Tensor:
        return self._streamed

    @streamed.setter
    def streamed(self, tensor: torch.Tensor) -> None:
        self._streamed, self._learning.streamed = tensor, tensor[: self._first]

    def update(self, gradient: torch.Tensor, *, step: int, scale: float, lr: float) -> None:
        self._learning.update(gradient, step=step, scale=scale, lr=lr)

    def master(self) -> torch.Tensor:
        return torch.cat([self._learning.master(), self.streamed[self._first :].float()])

    def load_master(self, weights: torch.Tensor, offset: int = 0) -> None:
        learning = min(weights.numel(), max(0, self._first - offset))
        if learning:
            self._learning.load_master(weights[:learning], offset)
        self.streamed[offset + learning : offset + weights.numel()] = weights[learning:]

    def state(self) -> Mapping[str, torch.Tensor]:
        return self._learning.state()

    def state_beside_streamed(self) -> Mapping[str, torch.Tensor]:
        return self._learning.state_beside_streamed()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._learning.load_state(state)

    def kept(self) -> dict[str, torch.Tensor]:
        return cast(MovableOptimizer, self._learning).kept()

    def keep_in(self, places: Mapping[str, torch.Tensor]) -> None:
        cast(MovableOptimizer, self._learning).keep_in(places)


class HostUnit:
    """A unit's parameters as one flat buffer on the host, with the gradient of those that learn beside it.

    What learns comes first, so that a gradient is as long as the weights that it is for.
    """

    def __init__(
        self,
        name: str,
        path: str,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        optimizer: Optimizer | None,
        owner: HostUnit | None = None,
    ) -> None:
        """``parameters`` are named inside ``path``; ``owner`` is the unit that holds this one's (tied) weights.

        Without an owner the unit takes the parameters' values, and each loses its memory as soon as that is done.
        """
        self.name, self.path, self.dtype = name, path, dtype
        self.parameters = dict(parameters)
        self.gradient: torch.Tensor | None = None
        self.buffers = Buffers(nn.Module())
        """Those of the unit's module, none until somebody sets them."""
        self.at_rest: type[nn.Parameter] = nn.Parameter
        """Class of the parameters while they have no memory."""
        self.weights: UnitOptimizer
        self.layout: Layout
        self.learning: Layout
        """The first part of the layout: parameters that are not frozen."""
        if owner is not None:
            self.layout, self.learning, self.weights = owner.layout, owner.learning, owner.weights
            return
        learning = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.learning = Layout.of({name: tuple(p.shape) for name, p in learning.items()})
        self.layout = Layout.of({name: tuple(p.shape) for name, p in (learning | self.parameters).items()})
        self.weights = self._take_over(optimizer)

    def _take_over(self, optimizer: Optimizer | None) -> UnitOptimizer:
        """Weights with the optimizer's state for those that learn; at no time is more than a parameter there twice."""
        weights = self._zeros(optimizer)
        for segment in self.layout.segments:
            parameter = self.parameters[segment.name]
            weights.load_master(parameter.detach().reshape(-1), segment.offset)
            parameter.data = torch.empty(0, dtype=self.dtype, device="cpu")
        return weights

    def _zeros(self, optimizer: Optimizer | None) -> UnitOptimizer:
        learning, numel = self.learning.numel, self.layout.numel
        if optimizer is None or not learning:
            return FixedWeights(numel, self.dtype)
        weights = optimizer.unit(self.learning, None, self.dtype, path=self.path)
        return weights if learning == numel else PartlyFrozen(weights, numel - learning)

    def gradient_buffer(self, device: Device, *, adds: bool) -> torch.Tensor:
        """The host's gradient: float32 once several contributions are added up, the compute dtype before.

        What is there stays there.
        """
        before, dtype = self.gradient, torch.float32 if adds else self.dtype
        if before is None or (adds and before.dtype != dtype):
            self.gradient = device.host_empty(self.learning.numel, dtype)
            self.gradient.zero_() if before is None else self.gradient.copy_(before)
        assert self.gradient is not None
        return self.gradient

    def park(self, file: ScratchFile) -> None:
        """Move the optimizer's state to NVMe, if there is any.

        Raises ProgramError for an optimizer whose state cannot be moved.
        """
        if not self.learning.numel:
            return
        optimizer = self.weights._learning if isinstance(self.weights, PartlyFrozen) else self.weights
        if not hasattr(optimizer, "keep_in"):
            raise ProgramError(
                f"the policy keeps the optimizer state of {self.name} on NVMe, "
                f"but {type(optimizer).__name__} keeps its state to itself",
                hint="use HybridAdamW, or plan with optimizer_home host",
            )
        self.weights = ParkedOptimizer(cast(MovableOptimizer, self.weights), file)

    @property
    def host_bytes(self) -> int:
        """Host memory of weights and optimizer state."""
        if isinstance(self.weights, ParkedOptimizer):
            return self.weights.streamed.nbytes
        beside = sum(tensor.nbytes for tensor in self.weights.state_beside_streamed().values())
        return self.weights.streamed.nbytes + beside

    def bind(self, flat: torch.Tensor) -> None:
        """Make the module's parameters views into ``flat``, its weights on the device."""
        with unseen():
            for segment in self.layout.segments:
                parameter = self.parameters[segment.name]
                parameter.__class__ = nn.Parameter
                parameter.data = flat[segment.offset : segment.offset + segment.numel].view(segment.shape)

    def unbind(self, device: torch.device) -> None:
        """Give the module's parameters no memory: whoever uses one outside its turn is answered by `at_rest`."""
        with unseen():
            for parameter in self.parameters.values():
                parameter.__class__ = nn.Parameter
                parameter.data = torch.empty(0, dtype=self.dtype, device=device)
                parameter.__class__ = self.at_rest

    def note_versions(self) -> None:
        """From now on `check_unwritten` looks for writes into the parameters' memory."""
        for parameter in self.parameters.values():  # a tied one is several units'
            vars(parameter)[NOTED_VERSION] = parameter._version

    def check_unwritten(self) -> None:
        """Raise ProgramError where somebody wrote into memory that a parameter had for a while: it is lost."""
        for name, parameter in self.parameters.items():
            if parameter._version != getattr(parameter, NOTED_VERSION):
                raise ProgramError(
                    f"{name} of {self.name} was written in place while it lay where its values do not: inside a "
                    "forward, or in what model.state_dict() gave before",
                    hint="write into the parameter itself, outside a forward and under torch.no_grad(), or use "
                    "model.load_state_dict(); these weights must be loaded again",
                )

    def receive(self, gradients: Mapping[str, torch.Tensor | None], into: torch.Tensor, device: Device) -> None:
        """Copy gradients, by parameter name, to their places in a flat host tensor; None is zero, padding too."""
        places, sources = [], []
        for segment in self.learning.segments:
            if segment.end > segment.offset + segment.numel:
                into[segment.offset + segment.numel : segment.end] = 0
            part = into[segment.offset : segment.offset + segment.numel]
            gradient = gradients[segment.name]
            if gradient is None:
                part.zero_()
            else:
                places.append(part.view(segment.shape))
                sources.append(gradient)
        device.copy_all(places, sources)

    def named(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a flat tensor of this unit by full parameter name."""
        prefix = f"{self.path}." if self.path else ""
        return {f"{prefix}{s.name}": flat[s.offset : s.offset + s.numel].view(s.shape) for s in self.layout.segments}
