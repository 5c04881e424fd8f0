"""Interprets step programs.

The model's own forward and ``loss.backward()`` drive the engine: each call of a unit is a tick that names the next
compute operation of the program. The engine first hands every operation before it to the streams, in program order,
then runs it on the caller's thread, then hands over what follows. It knows no planner, model family or device.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ProgramError
from ..head_loss import (
    Logits,
    RowLoss,
    loss_only,
    loss_with_gradients,
    row_log_probabilities,
    row_loss_with_gradients,
    supervised,
)
from ..model_facts import ModelFacts
from ..policy import Op, Policy, Program, lower, lower_forward
from ..replay import Call, RngState, output_tensors
from .devices import Device, Event
from .internals import Graph, Internals, Products
from .stores import ActivationStore, HostUnit, Optimizer

Work = Callable[[], None]
Gradients = dict[str, torch.Tensor | None]
KEEP: dict[str, type[Internals]] = {"matmuls": Products, "all": Graph}


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An optimizer step that is decided but not yet applied to every unit."""

    step: int
    lr: float
    scale: float


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
        self.owner = [names.index(u.shares_weights_with or u.name) for u in facts.units]
        self.first_layer, self.head = len(facts.before), len(units) - 1
        self.stall_s: dict[str, float] = defaultdict(float)
        self.moved_bytes: Counter[str] = Counter()
        self._forward_program = lower_forward(facts, weight_slots=policy.weight_slots)
        self._programs: dict[int, Program] = {}
        self._activations: dict[int, ActivationStore] = {}
        self._slots = self._allocate_slots()
        self._staging: list[torch.Tensor] = []
        self._updates: dict[str, Event] = {}
        self._reset(self._forward_program)

    def _allocate_slots(self) -> list[torch.Tensor]:
        layers = self.units[self.first_layer : self.first_layer + len(self.facts.layers)]
        largest = max(layer.layout.numel for layer in layers)
        resident = [layers[layer.index].layout.numel for layer in self.policy.layers if layer.resident]
        sizes = [largest] * self.policy.weight_slots + resident
        slots = [self.device.empty(numel, layers[0].dtype) for numel in sizes]
        for slot in slots:
            slot.fill_(float("nan"))  # a layer that reads before its load has ended is seen at once
        return slots

    def _reset(self, program: Program) -> None:
        self.program, self._next = program, len(program.ops)
        self._events: dict[str, Event] = {}
        self._calls: dict[tuple[int, int], Call] = {}
        self._kept: dict[tuple[int, int], Internals] = {}
        self._outgoing: dict[tuple[int, int], Gradients] = {}
        self._own_weights: dict[str, torch.Tensor] = {}  # by the operation that loaded them
        self._staged: dict[str, torch.Tensor] = {}
        self._squares: dict[int, float] = {}
        self._last_output = 0
        self._head_weights: torch.Tensor | None = None  # while they wait for a backward that the engine does not do

    # ---- ticks: called by the stand-ins

    def next_of(self, units: Sequence[int]) -> int:
        """Which of a module's units, one for each time it is called, is meant by its next call."""
        op = self._upcoming()
        return op.unit if op is not None and op.unit in units else units[0]

    def infer(self, unit: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit without gradients."""
        with self._ticking():
            if unit == 0 and not self._inside_step():
                self._begin(self._forward_program)
            op = self._advance("forward", unit)
            with self._weights(op):
                output = run(*args, **kwargs)
            self._finish(op)
        return output

    def forward(self, unit: int, call: Call) -> Any:
        """Run a unit's forward of a training step; keep its input where the policy says."""
        with self._ticking():
            if unit == 0 and self._next == len(self.program.ops):
                self._begin_step()
            op = self._peek("forward", unit)
            key = (unit, op.micro)
            boundary = self._take_boundary(key, call)
            self._advance("forward", unit)
            call.rng = RngState.now(self.device.torch_device)
            with self._weights(op) as slot:
                if op.internals == "none":
                    output = call.forward(boundary)
                else:
                    kept = self._kept[key] = KEEP[op.internals]()
                    output = kept.forward(call, boundary, slot)
            if self._home(unit) != "gpu":
                self._store.drop(key)
            self._calls[key] = call
            self._last_output = next((tensor.data_ptr() for tensor in output_tensors(output)), 0)
            self._finish(op)
        return output

    def forward_whole(self, call: Call) -> Any:
        """Run the head in a training step; its logits go to a loss that is not the engine's."""
        with self._ticking():
            op = self._advance("loss", self.head)
            call.rng = RngState.now(self.device.torch_device)
            with self._weights(op) as flat:
                output = call.forward()
            self._head_weights = flat
            self._calls[self.head, op.micro] = call
            self._finish(op)
        return output

    def backward(self, unit: int, call: Call, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run a unit again with a graph, send its parameters' gradients off, return those of its inputs."""
        with self._ticking():
            self._pass_over(unit)
            op = self._advance("backward", unit)
            key, host = (unit, op.micro), self.units[unit]
            del self._calls[key]
            wanted = list(host.parameters.values())
            boundary = None if unit == self.head else self._store.get(key)
            self._store.drop(key)
            with self._weights(op) as slot, self._replaying(call):
                if op.internals == "none":
                    inputs, parameters = call.backward(boundary, gradients, wanted)
                else:
                    assert boundary is not None
                    inputs, parameters = self._kept.pop(key).backward(call, boundary, slot, gradients, wanted)
            self._outgoing[key] = dict(zip(host.parameters, parameters, strict=True))
            self._finish(op)
        return inputs

    def end_backward(self) -> None:
        """Autograd is done: units that it did not come to have no gradient."""
        with self._ticking():
            self._pass_over(-1)

    def _pass_over(self, unit: int) -> None:
        """Do the backward of every unit before ``unit`` that autograd left out: the loss does not depend on them."""
        while (op := self._upcoming()) is not None and op.kind == "backward" and op.unit != unit:
            self._advance("backward", op.unit)
            key = (op.unit, op.micro)
            self._store.drop(key)
            self._calls.pop(key, None)
            self._kept.pop(key, None)
            if op.unit == self.head:
                self._head_weights = None
            else:
                with self._weights(op):
                    pass  # they were loaded for nothing
            self._outgoing[key] = dict.fromkeys(self.units[op.unit].parameters)
            self._finish(op)

    def loss(
        self,
        logits: Logits,
        states: torch.Tensor,
        labels: torch.Tensor,
        normaliser: float | None,
        row_loss: RowLoss | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of the step's next micro-batch and its gradient for ``states`` (B, T, H).

        ``normaliser`` is the number of supervised tokens of the whole step; by default those of this micro-batch.
        ``row_loss`` makes the loss of the rows' log-probabilities instead.
        """
        with self._ticking():
            op, host = self._advance("loss", self.head), self.units[self.head]
            rows, targets = supervised(labels)
            flat = states.reshape(-1, states.shape[-1])
            learned = list(host.parameters.values())
            with self._weights(op):
                if row_loss is None:
                    items = normaliser or max(1, len(targets))
                    total, gradient, parameters = loss_with_gradients(logits, flat, rows, targets, items, learned)
                else:
                    total, gradient, parameters = row_loss_with_gradients(
                        logits, flat, rows, targets, labels.shape, row_loss, learned
                    )
            self._outgoing[self.head, op.micro] = dict(zip(host.parameters, parameters, strict=True))
            self._finish(op)
        return total, gradient.view_as(states)

    def loss_backward(self, state_gradient: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Scale the head's gradients by that of the loss, and send those of its parameters off."""
        with self._ticking():
            op = self._advance("backward", self.head)
            if scale.item() != 1.0:
                for gradient in (state_gradient, *self._outgoing[self.head, op.micro].values()):
                    if gradient is not None:
                        gradient.mul_(scale)
            self._finish(op)
        return state_gradient

    def infer_loss(
        self,
        logits: Logits,
        states: torch.Tensor,
        labels: torch.Tensor,
        normaliser: float | None,
        row_loss: RowLoss | None = None,
    ) -> torch.Tensor:
        """The loss without gradients."""
        rows, targets = supervised(labels)
        flat = states.reshape(-1, states.shape[-1])
        if row_loss is not None:
            return row_loss(
                self.infer(self.head, row_log_probabilities, (logits, flat, rows, targets, labels.shape), {})
            )
        total = self.infer(self.head, loss_only, (logits, flat, rows, targets), {})
        return total / (normaliser or max(1, len(targets)))  # type: ignore[no-any-return]

    # ---- the step as a whole

    def finish_step(self) -> Any:
        """What clipping decided, when the last gradient has arrived. Raises ProgramError before that."""
        if not self._events or self._next < len(self.program.ops) or "clip" not in self._events:
            raise ProgramError(
                f"step() came before the backward of all {self.accumulation} micro-batches ended",
                hint="run forward and backward of every micro-batch of the step first",
            )
        self._events["clip"].wait()
        self._events.clear()
        assert self.optimizer is not None, "a step is only taken with an optimizer"
        total = sum(self._squares[unit] for unit in sorted(self._squares))
        return self.optimizer.clip(total)

    def start_updates(self, update: PendingUpdate) -> None:
        """Update every unit on the ``cpu`` stream, in the order in which the next forward needs them."""
        for op in self.program.ops:
            if op.kind == "update":
                self._updates[op.id] = self._submit(op, self._update(op, update), op.bytes, ())

    def flush(self) -> None:
        """Return when every update has been applied."""
        for event in self._updates.values():
            event.wait()

    def last_update(self, unit: int) -> Event:
        """The end of the unit's last update; one that has ended when there was none."""
        programs = self._programs.values()
        ops = (op.id for program in programs for op in program.ops if op.kind == "update" and op.unit == unit)
        return self._updates.get(next(ops, ""), Event.ended())

    def wait_for_gradients(self) -> None:
        """Return when every gradient of the step has arrived on the host."""
        for event in list(self._events.values()):
            event.wait()

    def abandon(self) -> None:
        """Give up the step that is under way; weights stay as they were before it."""
        for event in list(self._events.values()):
            with _ignoring_errors():
                event.wait()
        for store in self._activations.values():
            store.clear()
        self._reset(self._forward_program)

    def close(self) -> None:
        """Give up what is under way and free everything but the weights."""
        self.abandon()
        for store in self._activations.values():
            store.close()
        self._slots.clear()
        self.device.close()

    @property
    def activation_host_bytes(self) -> int:
        """Host memory held for boundaries and for gradients that wait to be added up."""
        staging = sum(buffer.nbytes for buffer in self._staging)
        return staging + max((store.host_bytes for store in self._activations.values()), default=0)

    # ---- the interpreter

    def _begin_step(self) -> None:
        if self.accumulation not in self._programs:
            program = lower(self.policy, self.facts, accumulation=self.accumulation)
            for store in self._activations.values():
                store.close()
            self._programs = {self.accumulation: program}
            self._activations = {self.accumulation: ActivationStore(program, self.device, self.nvme_directory)}
            self._allocate_gradients(program)
        self._store = self._activations[self.accumulation]
        self._begin(self._programs[self.accumulation])

    def _allocate_gradients(self, program: Program) -> None:
        contributions = Counter(self.owner[op.unit] for op in program.ops if op.kind == "gradient")
        for unit, count in contributions.items():
            self.units[unit].gradient_buffer(self.device, count)
        staging = [buffer for buffer in program.buffers if buffer.name.startswith("gradient_staging.")]
        dtype = self.units[0].dtype
        self._staging = [self.device.host_empty(b.bytes // dtype.itemsize, dtype) for b in staging]

    def _begin(self, program: Program) -> None:
        self._reset(program)
        for self._next, op in enumerate(program.ops):
            if op.kind != "update":
                break
            self._events[op.id] = self._updates.get(op.id, Event.ended())
        if program is self._forward_program:
            self.flush()

    def _inside_step(self) -> bool:
        """Whether a training step has begun and not ended."""
        return self.program is not self._forward_program and self._next < len(self.program.ops)

    def _upcoming(self) -> Op | None:
        """The next compute operation that the model drives, if the program has one."""
        ops = self.program.ops
        return next((op for op in ops[self._next :] if op.stream == "compute" and op.kind != "recompute"), None)

    def _peek(self, kind: str, unit: int) -> Op:
        """The next compute operation that the model drives; raise ProgramError if it is not the one named."""
        expected = self._upcoming()
        if expected is None or (expected.kind, expected.unit) != (kind, unit):
            wanted = expected.id if expected else "the step to end with step()"
            raise ProgramError(
                f"the model runs {kind} of {self.units[unit].name} where the program has {wanted}",
                hint="run forward, backward, step in turn, and evaluate under torch.no_grad() between steps",
            )
        return expected

    def _advance(self, kind: str, unit: int) -> Op:
        """Issue everything before the operation named, and make compute wait for what it needs."""
        target = self._peek(kind, unit)
        while (op := self.program.ops[self._next]) is not target:
            if op.kind == "recompute":
                self._recompute(op)
            else:
                self._issue(op)
        self._await(op)
        return op

    def _recompute(self, op: Op) -> None:
        self._await(op)
        key = (op.unit, op.micro)
        with self._weights(op), self._replaying(self._calls[key]), torch.no_grad():
            output = self._calls[key].forward(self._store.get(key))
        self._store.put((op.unit + 1, op.micro), output_tensors(output)[0])
        self._finish(op)

    def _await(self, op: Op) -> None:
        self._started = time.perf_counter()
        for name in op.after:
            before = time.perf_counter()
            self.device.compute_waits(self._events[name])
            self.stall_s[self.program.ops[self.program.index[name]].stream] += time.perf_counter() - before
        self._started = time.perf_counter()

    def _finish(self, op: Op) -> None:
        self._events[op.id] = self.device.compute_event()
        self.device.recorder.add(op.id, "compute", self._started, 0)
        self._next += 1
        for following in self.program.ops[self._next :]:
            if following.stream == "compute" or following.kind == "offload":
                break  # an offload's boundary comes with the next tick
            self._issue(following)

    def _issue(self, op: Op) -> None:
        work, nbytes = getattr(self, f"_{op.kind}")(op)
        after = [self._events[name] for name in op.after]
        if op.stream == "h2d":
            after.append(self.device.compute_event())  # the memory it fills may only just have been given up
        self._events[op.id] = self._submit(op, work, nbytes, after)
        self._next += 1

    def _submit(self, op: Op, work: Work, nbytes: int, after: Sequence[Event]) -> Event:
        self.moved_bytes[op.stream] += nbytes
        return self.device.streams[op.stream].submit(op.id, work, after, nbytes)

    # ---- the transfers: each returns the work for its stream and the bytes it moves

    def _load(self, op: Op) -> tuple[Work, int]:
        source = self.units[self.owner[op.unit]].weights.streamed
        if op.slot >= 0:
            target = self._slots[op.slot][: source.numel()]
        else:
            target = self._own_weights[op.id] = self.device.empty(source.numel(), source.dtype)
        self.device.lend(target, "h2d")
        return lambda: _copy(target, source), source.nbytes

    def _offload(self, op: Op) -> tuple[Work, int]:
        return self._store.offload((op.unit, op.micro))

    def _write(self, op: Op) -> tuple[Work, int]:
        return self._store.write((op.unit, op.micro))

    def _read(self, op: Op) -> tuple[Work, int]:
        return self._store.read((op.unit, op.micro))

    def _reload(self, op: Op) -> tuple[Work, int]:
        return self._store.reload((op.unit, op.micro))

    def _swap_out(self, op: Op) -> tuple[Work, int]:
        key = (op.unit, op.micro)
        return self._store.swap_out(key, self._kept[key])

    def _swap_in(self, op: Op) -> tuple[Work, int]:
        key = (op.unit, op.micro)
        return self._store.swap_in(key, self._kept[key])

    def _gradient(self, op: Op) -> tuple[Work, int]:
        owner, gradients = self.units[self.owner[op.unit]], self._outgoing.pop((op.unit, op.micro))
        addition = op.id.replace("gradient.", "accumulate.", 1)
        if addition in self.program.index:
            turn = len(self._staged) % len(self._staging)
            into = self._staged[addition] = self._staging[turn][: owner.layout.numel]
        else:
            assert owner.gradient is not None
            into = owner.gradient
        for gradient in gradients.values():
            if gradient is not None:
                self.device.lend(gradient, "d2h")
        return lambda: owner.receive(gradients, into), op.bytes

    def _accumulate(self, op: Op) -> tuple[Work, int]:
        into, part = self.units[self.owner[op.unit]].gradient, self._staged[op.id]
        assert into is not None
        return lambda: _add(into, part), op.bytes

    def _norm(self, op: Op) -> tuple[Work, int]:
        gradient = self.units[op.unit].gradient
        assert gradient is not None

        def work() -> None:
            if self.optimizer is not None:
                self._squares[op.unit] = self.optimizer.squares(gradient)

        return work, op.bytes

    def _clip(self, op: Op) -> tuple[Work, int]:
        return (lambda: None), 0

    def _update(self, op: Op, update: PendingUpdate) -> Work:
        unit = self.units[op.unit]
        assert unit.gradient is not None
        gradient = unit.gradient
        return lambda: unit.weights.update(gradient, step=update.step, scale=update.scale, lr=update.lr)

    # ---- helpers of the compute operations

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
    def _weights(self, op: Op) -> Iterator[torch.Tensor]:
        """Bind the unit's parameters to the memory its weights were loaded into, and give that."""
        unit = self.units[op.unit]
        if op.slot >= 0:
            flat = self._slots[op.slot]
        elif op.kind == "backward" and op.unit == self.head:
            assert self._head_weights is not None  # the loss has loaded them
            flat, self._head_weights = self._head_weights, None
        else:
            flat = self._own_weights.pop(next(name for name in op.after if name.startswith("load.")))
        unit.bind(flat)
        try:
            yield flat
        finally:
            unit.unbind(self.device.torch_device)

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


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _add(into: torch.Tensor, part: torch.Tensor) -> None:
    into += part


@contextmanager
def _ignoring_errors() -> Iterator[None]:
    """The error was raised already, where the step failed; here only the end matters."""
    try:
        yield
    except Exception:
        return
