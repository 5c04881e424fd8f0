"""`stream`: the same Hugging Face model, with its weights on the host and its layers carried through one device."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import NonFiniteGradient, ProgramError
from ..introspect import model_facts
from ..model_facts import ModelFacts
from ..policy import Policy
from ..structure import LOOSE, own_parameters, path_of
from ..timeline import Timeline
from . import failures
from .at_rest import check_parameters, lay_to_rest, let_go
from .buffers import Buffers
from .devices import Device, Emulated, Event, open_device
from .engine import Engine
from .homes import Keeper
from .kernels import apply_liger, compile_layers
from .model_state import ModelState
from .patches import Patches, inner_model, is_streamed, patch_methods
from .standins import StandIns
from .stores import HostUnit, Optimizer, UnitOptimizer
from .stores.nvme import NvmeFile
from .trainers import TrainerOptimizer
from .transfers import PendingUpdate

log = logging.getLogger(__name__)

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


def stream(
    model: nn.Module,
    policy: Policy,
    *,
    device: str | Emulated = "auto",
    optimizer: Optimizer | None = None,
    facts: ModelFacts | None = None,
    nvme_directory: str | Path | None = None,
    compile: bool | str = False,
    liger: bool = False,
    debug: bool = False,
) -> Streamed:
    """Take the model's weights over and stream its layers through ``device`` as ``policy`` says.

    ``streamed.model`` is the same object: ``model(**batch).loss.backward()`` and ``model.generate(...)`` work.
    The model may be one of ``transformers`` or of ``peft``. Parameters that are frozen now are streamed, and do not
    learn. Weights stream in the model's dtype (float32 or bfloat16). ``nvme_directory`` is where everything with a home
    on NVMe goes (the system's temporary directory by default). Raises ProgramError if the policy was made for another
    model or batch or a parameter has a hook on its gradient, HardwareError if it wants GPUDirect Storage where there is
    none, ModelError for what is no model of ``transformers``, OutOfMemory if the device has no room for the weight
    slots, or the host for the weights: the model is then as it was.

    Between their uses parameters have no memory; they are read and written all the same, under ``torch.no_grad()``, as
    those of a plain model (`at_rest`).

    ``compile`` compiles the layers (True: by torch's default backend; or a backend's name), ``liger`` gives them
    Liger's fused kernels; both change results by rounding, and `kernels` says what they cost and when they are refused.

    ``debug`` proves the waits of each program before it runs, watches that they are kept, fills memory that nobody may
    read any more with NaN, and raises InvariantBroken with the invariant's name (`policy.hazards.INVARIANTS`).
    """
    inner = inner_model(model)
    if is_streamed(inner):
        raise ProgramError("the model is streamed already", hint="close() that streaming first")
    check_parameters(inner)
    facts = facts or model_facts(
        inner,
        micro_batch=policy.micro_batch,
        sequence_length=policy.sequence_length,
        dtype="float32" if next(model.parameters()).dtype == torch.float32 else "bfloat16",
    )
    policy.check(facts)
    _say_what_is_converted(inner, facts)
    opened = open_device(device)
    patches = Patches()
    if liger:
        apply_liger(inner, opened.torch_device)
    if compile:
        compile_layers(inner, facts, policy, "inductor" if compile is True else compile, patches)
    directory = Path(nvme_directory or tempfile.gettempdir())
    states = NvmeFile(directory) if optimizer is not None and policy.optimizer_home == "nvme" else None
    units: list[HostUnit] = []
    try:
        units += _host_units(inner, facts, policy, optimizer, opened, states)
        for unit, known in zip(units, facts.units, strict=True):
            if not known.shares_weights_with:
                unit.weights.streamed = opened.adopt(unit.weights.streamed)
        engine = Engine(facts, policy, units, opened, optimizer, directory, debug=debug)
    except BaseException as error:
        _give_back(units, opened, states, patches)
        raise failures.in_compute(error) from error.__cause__
    return Streamed(model, engine, opened, optimizer, states, patches)


def _say_what_is_converted(model: PreTrainedModel, facts: ModelFacts) -> None:
    others = [name for name, p in model.named_parameters() if p.dtype != getattr(torch, facts.dtype)]
    if others:
        log.warning(
            "%d parameters (%s, ...) stream and compute in %s like the rest, which is not their dtype",
            *(len(others), others[0], facts.dtype),
        )


def _give_back(units: list[HostUnit], device: Device, states: NvmeFile | None, patches: Patches) -> None:
    patches.undo()
    for unit in units:
        unit.bind(unit.weights.streamed)
    device.close()
    if states is not None:
        states.close()


def _host_units(
    model: PreTrainedModel,
    facts: ModelFacts,
    policy: Policy,
    optimizer: Optimizer | None,
    device: Device,
    states: NvmeFile | None,
) -> list[HostUnit]:
    """The model's weights, taken over unit by unit; optimizer state that belongs on NVMe goes there at once."""
    dtype = getattr(torch, facts.dtype)
    parked = {facts.layers[layer.index].name for layer in policy.layers if layer.optimizer_home == "nvme"}
    units: dict[str, HostUnit] = {}
    loose = {name: model.get_parameter(name) for name in facts.loose}
    own = {
        unit.name: loose if unit.name == LOOSE else own_parameters(model.get_submodule(path_of(unit.name)), loose)
        for unit in facts.units
    }
    for unit in facts.units:
        owner = units.get(unit.shares_weights_with)
        path = "" if unit.name == LOOSE else path_of(unit.name)
        units[unit.name] = HostUnit(unit.name, path, own[unit.name], dtype, optimizer, owner)
        if path:
            units[unit.name].buffers = Buffers(model.get_submodule(path))
        if states is not None and unit.name in parked and unit.gradient_bytes:
            units[unit.name].park(states)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device.torch_device)
    return list(units.values())


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
