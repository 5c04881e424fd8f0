"""What a person may do with a streamed model: take steps, look at gradients, save, load, switch, trace, close."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import NonFiniteGradient, ProgramError
from ..policy import Policy
from ..timeline import Timeline
from .at_rest import lay_to_rest, let_go
from .devices import Device, Event
from .engine import Engine
from .homes import Keeper
from .model_state import ModelState
from .patches import Patches, inner_model, patch_methods
from .standins import StandIns
from .stores import HostUnit, Optimizer, UnitOptimizer
from .stores.nvme import NvmeFile
from .trainers import TrainerOptimizer
from .transfers import PendingUpdate

MAX_SKIPPED_STEPS = 3
"""So many non-finite gradients in a row end the run."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    step: int
    """Optimizer steps taken so far, this one included unless it was skipped."""
    grad_norm: float
    """Global gradient norm before clipping."""
    clip_scale: float
    """Factor that was applied to the gradient."""
    skipped: bool
    """Whether the gradient was not finite, so that nothing was changed."""


class Streamed:
    """A model under streaming. ``close`` gives the model its weights back."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        device: Device,
        optimizer: Optimizer | None,
        states: NvmeFile | None = None,
        patches: Patches | None = None,
    ) -> None:
        """``states`` holds the optimizer state that is on NVMe, ``patches`` what was changed in the model already.

        Both end with the streaming.
        """
        self.model, self.device, self.facts = model, device, engine.facts
        self.steps = 0
        self._open: Engine | None = engine
        self._optimizer, self._skipped, self._states = optimizer, 0, states
        self._trainer: TrainerOptimizer | None = None
        self._patches, inner = patches or Patches(), inner_model(model)
        self._prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is inner)
        self._standins = StandIns(inner, engine, self._patches)
        keeper = Keeper(device.torch_device, engine.flush, engine.weights_change, self._has_hidden_gradients)
        lay_to_rest(engine.units, keeper)
        self._state = ModelState(inner, engine.units, keeper)
        patch_methods(model, self._patches, self.zero_grad)

    @property
    def _engine(self) -> Engine:
        if self._open is None:
            raise ProgramError("the streaming of this model was closed", hint="stream() it again")
        return self._open

    @property
    def policy(self) -> Policy:
        """What the engine carries out."""
        return self._engine.policy

    def switch(self, policy: Policy) -> None:
        """Between two steps: carry out another policy from now on. Weights, states and the curve stay the same bits.

        Raises ProgramError unless it is for this model and batch and has state and gradients of the same layers on
        NVMe, and OutOfMemory where there is no room for it; the old policy goes on then.
        """
        self._engine.switch(policy)

    @property
    def accumulation(self) -> int:
        """Micro-batches of the next step; set it before a step that has fewer than the policy says."""
        return self._engine.accumulation

    @accumulation.setter
    def accumulation(self, micro_batches: int) -> None:
        self._engine.accumulation = micro_batches

    def step(self, lr: float | None = None, *, scale: float = 1.0) -> StepResult:
        """End the step: clip exactly, and start the update, which goes on while the next forward runs.

        ``scale`` multiplies the gradient before it is clipped. Raises NonFiniteGradient after three non-finite
        gradients in a row, ProgramError for a rate or scale that is not finite, or a negative rate.
        """
        if self._optimizer is None:
            raise _no_optimizer()
        rate = self._optimizer.lr if lr is None else lr
        if not (math.isfinite(rate) and rate >= 0 and math.isfinite(scale)):
            raise ProgramError(
                f"a step with learning rate {rate} and gradients scaled by {scale} would ruin the weights",
                hint="give a rate that is finite and not negative, and a finite scale",
            )
        clip = self._engine.finish_step(scale)
        if not clip.finite:
            self._skipped += 1
            if self._skipped >= MAX_SKIPPED_STEPS:
                raise NonFiniteGradient(
                    f"the gradient was not finite in {self._skipped} steps in a row (last: step {self.steps + 1}; "
                    f"the backward met it first in {self._engine.not_finite[-1]})",
                    hint="lower train.learning_rate or look at the data of these steps",
                )
            return StepResult(self.steps, clip.norm, 0.0, skipped=True)
        self._skipped = 0
        self.steps += 1
        self._engine.start_updates(PendingUpdate(self.steps, rate, scale * clip.scale))
        return StepResult(self.steps, clip.norm, clip.scale, skipped=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of a step that was not taken, as ``model.zero_grad()`` does."""
        self._engine.drop_gradients()
        if self._trainer is not None:
            self._trainer.hide_norm()

    def _has_hidden_gradients(self) -> bool:
        return self._trainer is None and self._open is not None and self._open.has_gradients

    def trainer_optimizer(self) -> TrainerOptimizer:
        """This model's optimizer, for trainers that drive the model: theirs decide when to step and to clip.

        ``Trainer(model=streamed.model, optimizers=(streamed.trainer_optimizer(), None), ...)``. From now on a step
        has as many micro-batches as the trainer runs before it. Raises ProgramError without an optimizer.
        """
        if self._optimizer is None:
            raise _no_optimizer()
        self._trainer = TrainerOptimizer(self, self._engine, self._optimizer)
        return self._trainer

    def save_pretrained(self, directory: str | Path) -> None:
        """Write what ``from_pretrained`` loads: the model, or its adapters if it has any."""
        save: Any = self.model.save_pretrained
        save(directory)

    def flush(self) -> None:
        """Return when the last step's update has been applied to every weight."""
        self._engine.flush()

    def gradients(self) -> dict[str, torch.Tensor]:
        """The step's gradients by parameter name, on the host, before clipping (for checks)."""
        self._engine.wait_for_gradients()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {
            names[id(unit.parameters[segment.name])]: gradient[segment.offset :][: segment.numel]
            .view(segment.shape)
            .clone()
            for index, unit in enumerate(self._engine.units)
            if (gradient := self._engine.gradient(index)) is not None
            for segment in unit.learning.segments
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights by parameter name, in the compute dtype, as the next forward will see them."""
        self.flush()
        named: dict[str, torch.Tensor] = {}
        for unit in self._engine.units:
            named |= {name: view.clone() for name, view in unit.named(unit.weights.streamed).items()}
        named |= {name: p.detach().clone() for name, p in self._standins.idle.items()}
        return {f"{self._prefix}{name}": tensor for name, tensor in named.items()}

    def unit_states(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        """Master weights and optimizer state of what learns, unit by unit, for a checkpoint."""
        self.flush()
        for _, unit in self._learning_units():
            yield unit.name, unit.weights.state()

    def unit_weights(self) -> list[tuple[str, UnitOptimizer, Event]]:
        """Name, weights and the end of the last update of every unit that `unit_states` has; waits for nothing."""
        return [(unit.name, unit.weights, self._engine.last_update(index)) for index, unit in self._learning_units()]

    def before_update(self, wait: Callable[[str, int], None]) -> None:
        """Have every update call ``wait`` with its unit's name and its step before it begins."""
        self._engine.before_update(wait)

    def named_weights(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Unit by unit, the weights by full parameter name: views, in the compute dtype, with every update applied."""
        self.flush()
        for unit, facts in zip(self._engine.units, self.facts.units, strict=True):
            if not facts.shares_weights_with:
                yield unit.name, unit.named(unit.weights.streamed)

    def layouts(self) -> dict[str, list[tuple[str, list[int], int]]]:
        """For each unit that `unit_states` has: full name, shape and offset of every parameter that learns, in its flat
        weights."""
        return {
            unit.name: [
                (f"{unit.path}.{s.name}" if unit.path else s.name, list(s.shape), s.offset)
                for s in unit.learning.segments
            ]
            for _, unit in self._learning_units()
        }

    def rest(self) -> dict[str, torch.Tensor]:
        """What no unit holds, by full name: copies of persistent buffers, as forwards have left them, and parameters
        that no text reaches."""
        buffers = {name: buffer.clone() for name, buffer in self._buffers().items()}
        return buffers | {name: parameter.detach() for name, parameter in self._standins.idle.items()}

    def load_rest(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take up what `rest` gave."""
        idle = {name: parameter.detach() for name, parameter in self._standins.idle.items()}
        for name, tensor in {**self._buffers(), **idle}.items():
            tensor.copy_(saved[name])

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"{path}.{name}" if path else name: buffer.detach()
            for path, module in self._standins.model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }

    def abandon(self) -> None:
        """Give up a step that is under way: weights and buffers are as they were after the last `step`."""
        self._engine.put_buffers_back()
        self._engine.abandon()

    def release_device(self) -> None:
        """Between two steps: finish the last update, and hold no device memory until `take_device`.

        What is left on a GPU is CUDA's own context and the model's buffers, some kilobytes.
        """
        self._engine.release()

    def take_device(self) -> None:
        """Take the device's memory again and go on, bit for bit as if nothing had been. Raises OutOfMemory."""
        self._engine.take()

    def _learning_units(self) -> list[tuple[int, HostUnit]]:
        pairs = zip(self._engine.units, self.facts.units, strict=True)
        return [(i, u) for i, (u, f) in enumerate(pairs) if f.gradient_bytes and not f.shares_weights_with]

    def load_unit_state(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        """Take up one unit's saved state."""
        self._engine.weights_change()
        next(unit for unit in self._engine.units if unit.name == name).weights.load_state(state)

    def trace(self, on: bool = True) -> None:
        """Record the spans of the operations from now on, or stop doing so."""
        self.device.recorder.on = on
        self.device.recorder.start()

    def timeline(self) -> Timeline:
        """What was recorded since `trace`."""
        spans = sorted(self.device.recorder.result(), key=lambda span: span.start_s)
        return Timeline(
            spans=spans,
            step_s=max((span.end_s for span in spans), default=0.0),
            exposed_s=self.stall_s(),
            peak_bytes={"gpu": self.device.peak_bytes},
        )

    def stall_s(self) -> dict[str, float]:
        """Seconds for which compute waited for each stream, since the start."""
        return self._engine.stall_s

    def moved_bytes(self) -> dict[str, int]:
        """Bytes that each stream moved, since the start."""
        return self._engine.moved_bytes

    def host_bytes(self) -> dict[str, int]:
        """Host memory held now: weights and optimizer state, gradients, activations."""
        owners = [
            u for u, facts in zip(self._engine.units, self.facts.units, strict=True) if not facts.shares_weights_with
        ]
        return {
            "weights_and_state": sum(unit.host_bytes for unit in owners),
            "gradients": sum(g.nbytes for g in self._engine.host_gradients()),
            "activations": self._engine.activation_host_bytes,
        }

    def close(self) -> None:
        """End streaming: the model gets its weights and its own forward back, on the CPU.

        Raises what made the last update fail, if it did; memory, threads and files are given back all the same.
        """
        if self._open is None:
            return
        engine, self._open = self._open, None
        try:
            engine.flush()
        finally:
            self._patches.undo()
            self._state.remove()
            let_go(engine.units)
            for unit in engine.units:
                unit.bind(unit.weights.streamed)
            engine.close()
            if self._states is not None:
                self._states.close()
                self._states = None

    def __enter__(self) -> Streamed:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _no_optimizer() -> ProgramError:
    return ProgramError("step() needs an optimizer", hint="stream(model, policy, optimizer=HybridAdamW(lr=...))")
