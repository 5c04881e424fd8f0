"""`stream`: the same Hugging Face model, with its weights on the host and its layers carried through one device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import NonFiniteGradient, ProgramError
from ..introspect import model_facts
from ..model_facts import ModelFacts
from ..policy import Policy
from ..structure import LOOSE, own_parameters, path_of
from ..timeline import Timeline
from .devices import Device, Emulated, Event, open_device
from .engine import Engine, PendingUpdate
from .standins import StandIns
from .stores import HostUnit, Optimizer, UnitOptimizer

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
    model: PreTrainedModel,
    policy: Policy,
    *,
    device: str | Emulated = "auto",
    optimizer: Optimizer | None = None,
    facts: ModelFacts | None = None,
    nvme_directory: str | Path | None = None,
) -> Streamed:
    """Take the model's weights over and stream its layers through ``device`` as ``policy`` says.

    ``streamed.model`` is the same object: ``model(**batch).loss.backward()`` and ``model.generate(...)`` work.
    Weights stream in the model's dtype (float32 or bfloat16). ``nvme_directory`` is where boundaries on NVMe go (the
    system's temporary directory by default). Raises ProgramError if the policy was made for another model or batch.
    """
    facts = facts or model_facts(
        model,
        micro_batch=policy.micro_batch,
        sequence_length=policy.sequence_length,
        dtype="float32" if next(model.parameters()).dtype == torch.float32 else "bfloat16",
    )
    policy.check(facts)
    opened = open_device(device)
    units = _host_units(model, facts, getattr(torch, facts.dtype), optimizer, opened)
    engine = Engine(facts, policy, units, opened, optimizer, Path(nvme_directory or tempfile.gettempdir()))
    return Streamed(model, engine, opened, optimizer)


def _host_units(
    model: PreTrainedModel, facts: ModelFacts, dtype: torch.dtype, optimizer: Optimizer | None, device: Device
) -> list[HostUnit]:
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
        if owner is None:
            units[unit.name].unbind(torch.device("cpu"))  # free the original as soon as it was taken over
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device.torch_device)
    return list(units.values())


class Streamed:
    """A model under streaming. ``close`` gives the model its weights back."""

    def __init__(self, model: PreTrainedModel, engine: Engine, device: Device, optimizer: Optimizer | None) -> None:
        self.model, self.device, self.policy, self.facts = model, device, engine.policy, engine.facts
        self.steps = 0
        self._engine, self._optimizer, self._skipped = engine, optimizer, 0
        self._standins = StandIns(model, engine)

    @property
    def accumulation(self) -> int:
        """Micro-batches of the next step; set it before a step that has fewer than the policy says."""
        return self._engine.accumulation

    @accumulation.setter
    def accumulation(self, micro_batches: int) -> None:
        self._engine.accumulation = micro_batches

    def step(self, lr: float | None = None) -> StepResult:
        """End the step: clip exactly, and start the update, which goes on while the next forward runs.

        Raises NonFiniteGradient after three non-finite gradients in a row.
        """
        if self._optimizer is None:
            raise ProgramError("step() needs an optimizer", hint="stream(model, policy, optimizer=HybridAdamW(lr=...))")
        clip = self._engine.finish_step()
        if not clip.finite:
            self._skipped += 1
            if self._skipped >= MAX_SKIPPED_STEPS:
                raise NonFiniteGradient(
                    f"the gradient was not finite in {self._skipped} steps in a row (last: step {self.steps + 1})",
                    hint="lower train.learning_rate or look at the data of these steps",
                )
            return StepResult(self.steps, clip.norm, 0.0, skipped=True)
        self._skipped = 0
        self.steps += 1
        rate = self._optimizer.lr if lr is None else lr
        self._engine.start_updates(PendingUpdate(self.steps, rate, clip.scale))
        return StepResult(self.steps, clip.norm, clip.scale, skipped=False)

    def flush(self) -> None:
        """Return when the last step's update has been applied to every weight."""
        self._engine.flush()

    def gradients(self) -> dict[str, torch.Tensor]:
        """The step's gradients by parameter name, on the host, before clipping (for checks)."""
        self._engine.wait_for_gradients()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {
            names[id(unit.parameters[segment.name])]: unit.gradient[segment.offset :][: segment.numel]
            .view(segment.shape)
            .clone()
            for unit in self._engine.units
            if unit.gradient is not None
            for segment in unit.layout.segments
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights by parameter name, in the compute dtype, as the next forward will see them."""
        self.flush()
        named: dict[str, torch.Tensor] = {}
        for unit in self._engine.units:
            named |= {name: view.clone() for name, view in unit.named(unit.weights.streamed).items()}
        return named | {name: p.detach().clone() for name, p in self._standins.idle.items()}

    def unit_states(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        """Master weights and optimizer state, unit by unit, for a checkpoint."""
        self.flush()
        for unit, facts in zip(self._engine.units, self.facts.units, strict=True):
            if not facts.shares_weights_with:
                yield unit.name, unit.weights.state()

    def unit_weights(self) -> list[tuple[str, UnitOptimizer, Event]]:
        """Name, weights and the end of the last update of every unit that owns weights; waits for nothing."""
        engine = self._engine
        return [
            (unit.name, unit.weights, engine.last_update(index))
            for index, (unit, facts) in enumerate(zip(engine.units, self.facts.units, strict=True))
            if not facts.shares_weights_with
        ]

    def rest(self) -> dict[str, torch.Tensor]:
        """What no unit holds, by full name: persistent buffers, and parameters that no text reaches."""
        names = {name for name, _ in self.model.named_buffers()} & self.model.state_dict().keys()
        buffers = {name: self.model.get_buffer(name).detach() for name in sorted(names)}
        return buffers | {name: parameter.detach() for name, parameter in self._standins.idle.items()}

    def load_rest(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take up what `rest` gave."""
        for name, tensor in self.rest().items():
            tensor.copy_(saved[name])

    def layouts(self) -> dict[str, list[tuple[str, list[int], int]]]:
        """For each unit that owns weights: full name, shape and offset of every parameter in its flat weights."""
        return {
            unit.name: [
                (f"{unit.path}.{s.name}" if unit.path else s.name, list(s.shape), s.offset)
                for s in unit.layout.segments
            ]
            for unit, facts in zip(self._engine.units, self.facts.units, strict=True)
            if not facts.shares_weights_with
        }

    def abandon(self) -> None:
        """Give up a step that is under way: weights stay as they were after the last `step`."""
        self._engine.abandon()

    def named_weights(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Unit by unit, the weights by full parameter name: views, in the compute dtype, with every update applied."""
        self.flush()
        for unit, facts in zip(self._engine.units, self.facts.units, strict=True):
            if not facts.shares_weights_with:
                yield unit.name, unit.named(unit.weights.streamed)

    def load_unit_state(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        """Take up one unit's saved state."""
        self.flush()
        next(unit for unit in self._engine.units if unit.name == name).weights.load_state(state)

    def trace(self, on: bool = True) -> None:
        """Record the spans of the operations from now on, or stop doing so."""
        self.device.recorder.on = on
        self.device.recorder.start()

    def timeline(self) -> Timeline:
        """What was recorded since `trace`."""
        spans = sorted(self.device.recorder.spans, key=lambda span: span.start_s)
        return Timeline(
            spans=spans,
            step_s=max((span.end_s for span in spans), default=0.0),
            exposed_s=self.stall_s(),
            peak_bytes={"gpu": self.device.peak_bytes},
        )

    def stall_s(self) -> dict[str, float]:
        """Seconds for which compute waited for each stream, since the start."""
        return dict(self._engine.stall_s)

    def moved_bytes(self) -> dict[str, int]:
        """Bytes that each stream moved, since the start."""
        return dict(self._engine.moved_bytes)

    def host_bytes(self) -> dict[str, int]:
        """Host memory held now: weights and optimizer state, gradients, activations."""
        owners = [
            u for u, facts in zip(self._engine.units, self.facts.units, strict=True) if not facts.shares_weights_with
        ]
        return {
            "weights_and_state": sum(t.nbytes for u in owners for t in u.weights.state().values()),
            "gradients": sum(u.gradient.nbytes for u in owners if u.gradient is not None),
            "activations": self._engine.activation_host_bytes,
        }

    def close(self) -> None:
        """End streaming: the model gets its weights and its own forward back, on the CPU."""
        self.flush()
        self._standins.remove()
        for unit in self._engine.units:
            unit.bind(unit.weights.streamed)
        self._engine.close()

    def __enter__(self) -> Streamed:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()
