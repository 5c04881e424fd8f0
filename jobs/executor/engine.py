"""Runs step programs, driven by the model: each call of a unit, forward or backward, is the program's next compute.

`interpreter` has the order of operations, `transfers` what those beside compute do, `weights` where weights lie. Here
is compute itself, and the step as a whole. None of them knows a planner, a model family or a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import ProgramError
from ..head_loss import Logits, loss_only, loss_with_gradients, supervised
from ..model_facts import ModelFacts
from ..policy import Op, Policy, Program, lower, lower_forward
from ..policy.order import micro_batches
from ..replay import Call, RngState, output_tensors
from .devices import Device, Event
from .internals import Graph, Internals, Products
from .interpreter import Interpreter
from .stores import ActivationStore, HostUnit, Optimizer
from .transfers import InFlight, PendingUpdate, Transfers
from .weights import DeviceWeights

KEEP: dict[str, type[Internals]] = {"matmuls": Products, "all": Graph}


class Engine:
    """Runs the programs of one model with one policy on one device. Not for use from several threads."""

    def __init__(
        self,
        facts: ModelFacts,
        policy: Policy,
        units: Sequence[HostUnit],
        device: Device,
        optimizer: Optimizer | None,
        nvme_directory: Path,
    ) -> None:
        self.facts, self.policy, self.units, self.device, self.optimizer = facts, policy, units, device, optimizer
        self.nvme_directory = nvme_directory
        self.accumulation = policy.accumulation
        names = [unit.name for unit in units]
        owner = [names.index(u.shares_weights_with or u.name) for u in facts.units]
        self.first_layer, self.head = len(facts.before), len(units) - 1
        self._forward_program = lower_forward(facts, weight_slots=policy.weight_slots)
        self._programs: dict[int, Program] = {}
        self._activations: dict[int, ActivationStore] = {}
        self._weights = DeviceWeights(facts, policy, units, device)
        self._transfers = Transfers(units, owner, self._weights, device, optimizer)
        self._interpreter = Interpreter(self._forward_program, names, device, self._transfers, self._recompute)
        self._updates: dict[str, Event] = {}
        self._last_output = 0  # address of what the unit before returned

    # ---- ticks: called by the stand-ins

    def next_of(self, units: Sequence[int]) -> int:
        """Which of a module's units, one for each time it is called, is meant by its next call."""
        op = self._interpreter.upcoming()
        return op.unit if op is not None and op.unit in units else units[0]

    def infer(self, unit: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit without gradients."""
        with self._ticking():
            if unit == 0 and not self._inside_step():
                self._begin(self._forward_program)
            op = self._interpreter.advance("forward", unit)
            with self._weights.bound(op):
                output = run(*args, **kwargs)
            self._interpreter.finish(op)
        return output

    def forward(self, unit: int, call: Call) -> Any:
        """Run a unit's forward of a training step; keep its input where the policy says."""
        with self._ticking():
            if unit == 0 and self._interpreter.at_end:
                self._begin_step()
            op = self._interpreter.peek("forward", unit)
            key = (unit, op.micro)
            boundary = self._take_boundary(key, call)
            self._interpreter.advance("forward", unit)
            call.rng = RngState.now(self.device.torch_device)
            with self._weights.bound(op) as slot:
                if op.internals == "none":
                    output = call.forward(boundary)
                else:
                    kept = self._in_flight.kept[key] = KEEP[op.internals]()
                    output = kept.forward(call, boundary, slot)
            if self._home(unit) != "gpu":
                self._store.drop(key)
            self._in_flight.calls[key] = call
            self._last_output = next((tensor.data_ptr() for tensor in output_tensors(output)), 0)
            self._interpreter.finish(op)
        return output

    def forward_whole(self, call: Call) -> Any:
        """Run the head in a training step; its logits go to a loss that is not the engine's."""
        with self._ticking():
            op = self._interpreter.advance("loss", self.head)
            call.rng = RngState.now(self.device.torch_device)
            with self._weights.bound(op) as flat:
                output = call.forward()
            self._weights.keep_for_head(flat)
            self._in_flight.calls[self.head, op.micro] = call
            self._interpreter.finish(op)
        return output

    def backward(self, unit: int, call: Call, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run a unit again with a graph, send its parameters' gradients off, return those of its inputs."""
        with self._ticking():
            self._pass_over(unit)
            op = self._interpreter.advance("backward", unit)
            key, host = (unit, op.micro), self.units[unit]
            del self._in_flight.calls[key]
            wanted = list(host.parameters.values())
            boundary = None if unit == self.head else self._store.get(key)
            self._store.drop(key)
            with self._weights.bound(op) as slot, self._replaying(call):
                if op.internals == "none":
                    inputs, parameters = call.backward(boundary, gradients, wanted)
                else:
                    assert boundary is not None
                    inputs, parameters = self._in_flight.kept.pop(key).backward(call, boundary, slot, gradients, wanted)
            self._in_flight.outgoing[key] = dict(zip(host.parameters, parameters, strict=True))
            self._interpreter.finish(op)
        return inputs

    def end_backward(self) -> None:
        """Autograd is done: units that it did not come to have no gradient."""
        with self._ticking():
            self._pass_over(-1)

    def _pass_over(self, unit: int) -> None:
        """Do the backward of every unit before ``unit`` that autograd left out: the loss does not depend on them."""
        while (op := self._interpreter.upcoming()) is not None and op.kind == "backward" and op.unit != unit:
            self._interpreter.advance("backward", op.unit)
            key = (op.unit, op.micro)
            self._store.drop(key)
            self._in_flight.calls.pop(key, None)
            self._in_flight.kept.pop(key, None)
            if op.unit == self.head:
                self._weights.keep_for_head(None)
            else:
                with self._weights.bound(op):
                    pass  # they were loaded for nothing
            self._in_flight.outgoing[key] = dict.fromkeys(self.units[op.unit].parameters)
            self._interpreter.finish(op)

    def loss(
        self, logits: Logits, states: torch.Tensor, labels: torch.Tensor, normaliser: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of the step's next micro-batch and its gradient for ``states`` (B, T, H).

        ``normaliser`` is the number of supervised tokens of the whole step; by default those of this micro-batch.
        """
        with self._ticking():
            op, host = self._interpreter.advance("loss", self.head), self.units[self.head]
            rows, targets = supervised(labels)
            flat = states.reshape(-1, states.shape[-1])
            with self._weights.bound(op):
                total, gradient, parameters = loss_with_gradients(
                    logits, flat, rows, targets, normaliser or max(1, len(targets)), list(host.parameters.values())
                )
            self._in_flight.outgoing[self.head, op.micro] = dict(zip(host.parameters, parameters, strict=True))
            self._interpreter.finish(op)
        return total, gradient.view_as(states)

    def loss_backward(self, state_gradient: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Scale the head's gradients by that of the loss, and send those of its parameters off."""
        with self._ticking():
            op = self._interpreter.advance("backward", self.head)
            if scale.item() != 1.0:
                for gradient in (state_gradient, *self._in_flight.outgoing[self.head, op.micro].values()):
                    if gradient is not None:
                        gradient.mul_(scale)
            self._interpreter.finish(op)
        return state_gradient

    def infer_loss(
        self, logits: Logits, states: torch.Tensor, labels: torch.Tensor, normaliser: float | None
    ) -> torch.Tensor:
        """The loss without gradients."""
        rows, targets = supervised(labels)
        flat = states.reshape(-1, states.shape[-1])
        total = self.infer(self.head, loss_only, (logits, flat, rows, targets), {})
        return total / (normaliser or max(1, len(targets)))  # type: ignore[no-any-return]

    # ---- the step as a whole

    def finish_step(self) -> Any:
        """What clipping decided, when the last gradient has arrived. Raises ProgramError before that."""
        run = self._interpreter
        if not run.at_end or not run.has_run("clip"):
            raise ProgramError(
                f"step() came before the backward of all {self.accumulation} micro-batches ended",
                hint="run forward and backward of every micro-batch of the step first",
            )
        run.wait_for("clip")
        run.forget_events()
        assert self.optimizer is not None, "a step is only taken with an optimizer"
        squares = self._in_flight.squares
        return self.optimizer.clip(sum(squares[unit] for unit in sorted(squares)))

    def start_updates(self, update: PendingUpdate) -> None:
        """Update every unit on the ``cpu`` stream, in the order in which the next forward needs them."""
        for op in self._interpreter.program.ops:
            if op.kind == "update":
                work = self._transfers.update(op, update)
                self._updates[op.id] = self._interpreter.submit(op, work, op.bytes, ())

    def flush(self) -> None:
        """Return when every update has been applied."""
        for event in self._updates.values():
            event.wait()

    def wait_for_gradients(self) -> None:
        """Return when every gradient of the step has arrived on the host."""
        self._interpreter.wait_for_all()

    def abandon(self) -> None:
        """Give up the step that is under way; weights stay as they were before it."""
        self._interpreter.drain()
        for store in self._activations.values():
            store.clear()
        self._transfers.begin()
        self._interpreter.reset(self._forward_program)

    def close(self) -> None:
        """Give up what is under way and free everything but the weights."""
        self.abandon()
        for store in self._activations.values():
            store.close()
        self._weights.close()
        self.device.close()

    @property
    def stall_s(self) -> dict[str, float]:
        """Seconds for which compute waited for each stream, since the start."""
        return dict(self._interpreter.stall_s)

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes that each stream moved, since the start."""
        return dict(self._interpreter.moved_bytes)

    @property
    def activation_host_bytes(self) -> int:
        """Host memory held for boundaries and for gradients that wait to be added up."""
        boundaries = max((store.host_bytes for store in self._activations.values()), default=0)
        return self._transfers.staging_bytes + boundaries

    # ---- beginning a program

    def _begin_step(self) -> None:
        if self.accumulation not in self._programs:
            program = lower(self.policy, self.facts, order=micro_batches(self.accumulation))
            for store in self._activations.values():
                store.close()
            self._programs = {self.accumulation: program}
            self._activations = {self.accumulation: ActivationStore(program, self.device, self.nvme_directory)}
            self._transfers.allocate_gradients(program)
        self._transfers.store = self._activations[self.accumulation]
        self._begin(self._programs[self.accumulation])

    def _begin(self, program: Program) -> None:
        self._transfers.begin()
        self._interpreter.begin(program, self._updates)
        if program is self._forward_program:
            self.flush()

    def _inside_step(self) -> bool:
        """Whether a training step has begun and not ended."""
        return self._interpreter.program is not self._forward_program and not self._interpreter.at_end

    # ---- helpers of the compute operations

    @property
    def _in_flight(self) -> InFlight:
        return self._transfers.in_flight

    @property
    def _store(self) -> ActivationStore:
        return self._transfers.store

    def _recompute(self, op: Op) -> None:
        """Run a unit's forward once more, for the boundary after it."""
        key = (op.unit, op.micro)
        call = self._in_flight.calls[key]
        with self._weights.bound(op), self._replaying(call), torch.no_grad():
            output = call.forward(self._store.get(key))
        self._store.put((op.unit + 1, op.micro), output_tensors(output)[0])

    def _take_boundary(self, key: tuple[int, int], call: Call) -> torch.Tensor:
        """Give the unit's input to the store, so that the call itself does not keep it alive."""
        unit = key[0]
        if call.boundary < 0:
            boundary = torch.zeros(1, device=self.device.torch_device)  # stands for an input that is not kept
        else:
            boundary = call.leaves[call.boundary].detach()
        self._check_size(unit, boundary)
        if self._home(unit) == "recompute" and boundary.data_ptr() != self._last_output:
            raise ProgramError(
                f"the model changes what {self.units[unit - 1].name} returns before {self.units[unit].name} reads it, "
                "so that boundary cannot be recomputed",
                hint="give this boundary another home",
            )
        if call.boundary >= 0:
            call.leaves[call.boundary] = None
        self._store.put(key, boundary)
        return boundary

    def _check_size(self, unit: int, boundary: torch.Tensor) -> None:
        layer = unit - self.first_layer
        if 0 <= layer < len(self.facts.layers) and boundary.nbytes > self.facts.boundary_bytes[layer]:
            raise ProgramError(
                f"the batch has activations of {boundary.nbytes:,} bytes a layer, the policy is for "
                f"{self.policy.micro_batch} x {self.policy.sequence_length} tokens: "
                f"{self.facts.boundary_bytes[layer]:,} bytes",
                hint="use a smaller micro-batch, or plan for the larger one",
            )

    def _home(self, unit: int) -> str:
        layer = unit - self.first_layer
        return self.policy.homes[layer] if 0 <= layer < len(self.facts.layers) else "gpu"

    @contextmanager
    def _replaying(self, call: Call) -> Iterator[None]:
        """Set the random generators to what they were when the unit first ran, then back."""
        now = RngState.now(self.device.torch_device)
        assert call.rng is not None
        call.rng.restore(self.device.torch_device)
        try:
            yield
        finally:
            now.restore(self.device.torch_device)

    @contextmanager
    def _ticking(self) -> Iterator[None]:
        """Count device memory; give the step up if anything goes wrong."""
        try:
            with self.device.counting():
                yield
        except BaseException:
            self.abandon()
            raise
