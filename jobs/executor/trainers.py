"""The optimizer that other people's trainers see.

A streamed model's gradients and optimizer states are the engine's, and its parameters have no memory between their
uses. Trainers still clip: they scale the ``.grad`` of all parameters by a factor of the norm over them. So one
parameter gets a gradient of two elements, whose norm is the true global one; what they have become by ``step()`` says
what the trainer has decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CheckpointError, ProgramError
from .engine import Engine
from .stores import HostUnit, Optimizer

if TYPE_CHECKING:
    from .streamed import Streamed

_SHARES = (0.6, 0.8)
"""Of the norm, for the two elements of the gradient that is shown: together they have that norm."""
_OPTIONS = ("lr", "betas", "eps", "weight_decay")


class TrainerOptimizer(torch.optim.Optimizer):
    """Drives a streamed model's optimizer as a trainer expects of a ``torch.optim.Optimizer``.

    Learning rate, betas, eps and weight decay are those in ``param_groups``, at each step. If the streamed optimizer
    has a ``max_grad_norm`` too, it clips what the trainer's clipping leaves.
    """

    def __init__(self, streamed: Streamed, engine: Engine, inner: Optimizer) -> None:
        self._streamed, self._engine, self._inner = streamed, engine, inner
        streamed_parameters = {id(p) for unit in engine.units for p in unit.parameters.values()}
        learning = [p for p in streamed.model.parameters() if p.requires_grad and id(p) in streamed_parameters]
        if not learning:
            raise ProgramError("every parameter of the model is frozen", hint="let some learn before stream()")
        self._stand_in = learning[-1]  # not the first, whose dtype is taken for the model's
        self._dtype = self._stand_in.dtype
        self._norm: float | None = None
        self._ready = False
        options = {name: self._settings[name] for name in _OPTIONS}
        super().__init__(learning, options)
        self._ready = True
        engine.open_ended, engine.on_gradients = True, self._show_norm

    @property
    def _settings(self) -> dict[str, Any]:
        return self._inner.param_groups[0]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The parameters are the streamed model's: another group raises ProgramError."""
        if self._ready:
            raise ProgramError(
                "a streamed model has one parameter group", hint="matrices decay, norms and biases do not"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take the step with the gradients that arrived, scaled as the trainer has scaled them."""
        if closure is not None:
            raise ProgramError("a streamed model's step cannot evaluate the loss again", hint="call step() alone")
        self._follow_options()
        scale = self._trainers_scale()
        self.hide_norm()
        self._streamed.step(scale=scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of a step that was not taken."""
        self._streamed.zero_grad()

    # ---- clipping

    def _show_norm(self) -> None:
        """All gradients are there: let the trainer see their norm."""
        self._norm = math.sqrt(self._engine.gradient_squares())
        self._show(torch.tensor([share * self._norm for share in _SHARES], dtype=torch.float32))

    def _trainers_scale(self) -> float:
        if self._norm is None or self._stand_in.grad is None or not 0 < self._norm < math.inf:
            return 1.0
        left: list[float] = self._stand_in.grad.tolist()
        first, second = (value / (share * self._norm) for value, share in zip(left, _SHARES, strict=True))
        if math.isfinite(first + second) and not math.isclose(first, second, rel_tol=1e-3):
            raise ProgramError(
                "the trainer clips gradients one by one, which a streamed model does not show it",
                hint="clip by the global norm (max_grad_norm), or not at all",
            )
        return float(first)

    def hide_norm(self) -> None:
        """There are no gradients any more."""
        if self._norm is not None:
            self._norm = None
            self._show(None)

    def _show(self, gradient: torch.Tensor | None) -> None:
        """Let the stand-in have this gradient; its memory, which nobody looks at, must be as large."""
        stand_in = self._stand_in
        with torch._C.DisableTorchFunctionSubclass():
            stand_in.grad = None
            if gradient is None:
                stand_in.data = torch.empty(0, dtype=self._dtype, device=stand_in.device)
            else:
                stand_in.data = torch.empty_like(gradient, device=stand_in.device)
                stand_in.grad = gradient.to(stand_in.device)

    # ---- options and state

    def _follow_options(self) -> None:
        wanted = {name: self.param_groups[0][name] for name in _OPTIONS}
        wanted["lr"] = float(wanted["lr"])
        if any(self._settings[name] != wanted[name] for name in _OPTIONS):
            self._streamed.flush()  # updates read them while they run
            self._settings.update(wanted)

    def state_dict(self) -> dict[str, Any]:
        """Options, steps, and what each unit has beside the weights that ``model.state_dict()`` gives.

        Without states before the first step. The tensors are the live ones, and stay on the host wherever they are
        sent.
        """
        self._streamed.flush()
        group = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        return {
            "state": self._states() if self._streamed.steps else {},
            "param_groups": [{**group, "params": list(range(len(self.param_groups[0]["params"])))}],
            "steps": self._streamed.steps,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what ``state_dict()`` gave. Raises CheckpointError if another optimizer or model gave it."""
        groups = state_dict["param_groups"]
        count = len(self.param_groups[0]["params"])
        if "steps" not in state_dict or len(groups) != 1 or len(groups[0]["params"]) != count:
            raise CheckpointError(
                f"this is no optimizer state of a streamed model with {count} parameters that learn",
                hint="resume with the model and the trainer that saved it",
            )
        for name, value in groups[0].items():
            if name != "params":
                self.param_groups[0][name] = tuple(value) if name == "betas" else value
        self._load_states(state_dict["state"])
        self._streamed.steps = state_dict["steps"]

    def _states(self) -> dict[str, dict[str, torch.Tensor]]:
        return {
            unit.name: {name: t.as_subclass(_OnHost) for name, t in unit.weights.state_beside_streamed().items()}
            for unit in self._learning_units()
        }

    def _load_states(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        units = {unit.name: unit for unit in self._learning_units()}
        if states and states.keys() != units.keys():
            wrong = min(states.keys() ^ units.keys())
            raise CheckpointError(
                f"the optimizer state is of another model: {wrong} is in one of them only",
                hint="resume with the model and the trainer that saved it",
            )
        self._streamed.flush()
        for name, state in states.items():
            units[name].weights.load_state({key: t.as_subclass(torch.Tensor) for key, t in state.items()})

    def _learning_units(self) -> list[HostUnit]:
        pairs = zip(self._engine.units, self._engine.facts.units, strict=True)
        return [unit for unit, facts in pairs if facts.gradient_bytes and not facts.shares_weights_with]


class _OnHost(torch.Tensor):
    """A tensor that trainers cannot move to the device, where there is no room for it; saved like any other."""

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)
