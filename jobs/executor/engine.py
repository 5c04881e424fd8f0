"""Runs step programs, driven by the model: each call of a unit, forward or backward, is the program's next compute.

`steps` has the order of forwards and backwards, `interpreter` that of the operations, `compute` and `transfers` what
operations do, `weights` where weights lie, `updates` how a step ends. Here is what the model's stand-ins and the user
call. None of them knows a planner, a model family or a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import ProgramError
from ..head_loss import Logits, RowLoss, Targets, loss_only, row_log_probabilities
from ..model_facts import ModelFacts
from ..policy import Policy
from ..replay import Call, outside_inference_mode
from . import failures
from .checks import Checks, NoChecks
from .compute import Compute
from .devices import Device, Event
from .interpreter import Interpreter
from .steps import Steps, Turn
from .stores import HostUnit, Optimizer
from .stores.gpudirect import check_gpudirect
from .transfers import PendingUpdate, Transfers
from .weights import DeviceWeights


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
        *,
        debug: bool = False,
    ) -> None:
        self.facts, self.units, self.device, self.optimizer = facts, units, device, optimizer
        self.on_gradients: Callable[[], None] | None = None
        """Called when a backward has ended and with it, as far as is known, the step's gradients."""
        self.head = len(units) - 1
        names = [unit.name for unit in units]
        self._owner = [names.index(u.shares_weights_with or u.name) for u in facts.units]
        self._directory, self._debug = nvme_directory, debug
        self._fresh = False  # whether a forward of the model has been entered and no unit has run
        self._arrange(policy)

    def _arrange(self, policy: Policy) -> None:
        """Take the memory that the policy needs, and get ready to run its programs.

        Raises OutOfMemory, and HardwareError where NVMe cannot be reached from the device and the policy has it so.
        """
        if policy.direct_nvme and "nvme" in policy.homes:
            check_gpudirect(self.device, self._directory)
        self.policy = policy
        facts, units, device, owner = self.facts, self.units, self.device, self._owner
        self._weights = DeviceWeights(facts, policy, units, device)
        self._transfers = Transfers(units, owner, self._weights, device, self.optimizer)
        self._compute = Compute(facts, policy, units, device, self._weights, self._transfers)
        self._steps = Steps(facts, policy, units, owner, device, self._directory, self._transfers, self._weights)
        self._steps.learns = self.optimizer is not None
        checks = Checks(facts, device, self._weights, lambda: self.activation_host_bytes) if self._debug else NoChecks()
        names, recompute = [unit.name for unit in units], self._compute.recompute
        self._run = Interpreter(self._steps.evaluation, names, device, self._transfers, recompute, checks)
        self._steps.attach(self._run, self._pass_over)

    def switch(self, policy: Policy) -> None:
        """Between two steps: carry out another policy from now on; what was counted of steps begins anew.

        Raises ProgramError unless it is for this model and batch and has state and gradients of the same layers on
        NVMe, and OutOfMemory where there is no room for it. All is as before then.
        """
        policy.check(self.facts)
        if policy.homes_of_state != self.policy.homes_of_state:
            raise ProgramError(
                "the new policy has optimizer state or gradients of other layers on NVMe",
                hint="stop the run and resume it with that policy",
            )
        self.flush()
        self.abandon()
        before_update, open_ended = self._transfers.before_update, self._steps.open_ended
        before = self.policy
        self._give_up()
        with self.device.counting():
            try:
                self._arrange(policy)
            except BaseException as error:
                self.device.give_back()
                self._arrange(before)
                raise failures.in_compute(error) from error.__cause__
            finally:
                self._transfers.before_update, self._steps.open_ended = before_update, open_ended

    # ---- ticks: called by the stand-ins

    def enter_model(self) -> None:
        """A forward of the model begins, whatever became of the one before."""
        self._fresh = True

    def next_of(self, units: Sequence[int]) -> int:
        """Which of a module's units, one for each time it is called, is meant by its next call."""
        op = None if self._fresh else self._run.upcoming()
        return op.unit if op is not None and op.kind != "backward" and op.unit in units else units[0]

    def head_is_next(self) -> bool:
        """Whether the base model has run and the head has not."""
        op = None if self._fresh else self._run.upcoming()
        return op is not None and op.unit == self.head and op.kind in ("forward", "loss")

    @property
    def turn(self) -> Turn:
        """The forward that runs: autograd is to hold it as long as its backward may come."""
        assert self._steps.turn is not None, "a forward with gradients has begun"
        return self._steps.turn

    def infer(self, unit: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit without gradients."""
        with self._ticking():
            self._begin_pass(self._steps.begin_evaluation)
            self._pass_over_embeddings(unit)
            op = self._run.advance("forward", unit)
            output = self._compute.infer(op, run, args, kwargs)
            self._run.finish(op)
        return output

    def forward(self, unit: int, call: Call) -> Any:
        """Run a unit's forward of a training step; keep its input where the policy says."""
        with self._ticking():
            self._begin_pass(self._steps.begin_forward)
            self._pass_over_embeddings(unit)
            op = self._run.peek("forward", unit)
            boundary = self._compute.take_boundary((unit, op.micro), call)
            self._run.advance("forward", unit)
            output = self._compute.forward(op, call, boundary)
            self._run.finish(op)
        return output

    def _pass_over_embeddings(self, unit: int) -> None:
        """Embeddings that the model leaves out, because it was given their output: nothing of theirs is used."""
        while (op := self._run.upcoming()) is not None and op.kind == "forward" and op.unit < unit:
            if self.facts.units[op.unit].kind != "before":
                return
            self._run.advance("forward", op.unit)
            self._compute.skip_forward(op)
            self._run.finish(op)

    def forward_whole(self, call: Call) -> Any:
        """Run the head in a training step; its logits go to a loss that is not the engine's."""
        with self._ticking():
            op = self._run.advance("loss", self.head)
            output = self._compute.forward_whole(op, call)
            self._run.finish(op)
        return output

    def backward(
        self, unit: int, turn: Turn, call: Call, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Run a unit again with a graph, send its parameters' gradients off, return those of its inputs."""
        with self._ticking():
            self._steps.begin_backward(turn)
            self._pass_over(unit)
            op = self._run.advance("backward", unit)
            inputs = self._compute.backward(op, call, gradients)
            self._run.finish(op)
        return inputs

    def end_backward(self) -> None:
        """Autograd is done: units that it did not come to have no gradient."""
        with self._ticking():
            self._pass_over()
        if self.on_gradients is not None and self._steps.gradients_are_complete:
            self.on_gradients()

    def _pass_over(self, unit: int = -1) -> None:
        """In the backward that runs, do that of every unit before ``unit``: autograd left them out."""
        while (op := self._steps.left_of_backward()) is not None and op.unit != unit:
            self._run.advance("backward", op.unit)
            self._compute.skip_backward(op)
            self._run.finish(op)

    def loss(
        self,
        logits: Logits,
        states: torch.Tensor,
        targets: Targets,
        normaliser: float | torch.Tensor | None,
        row_loss: RowLoss | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of the step's next micro-batch and its gradient for ``states`` (B, T, H).

        ``normaliser`` is the number of supervised tokens of the whole step; by default those of this micro-batch.
        ``row_loss`` makes the loss of the rows' log-probabilities instead.
        """
        with self._ticking():
            op = self._run.advance("loss", self.head)
            flat = states.reshape(-1, states.shape[-1])
            if row_loss is None:
                total, gradient = self._compute.loss(op, logits, flat, targets, _count(targets, normaliser))
            else:
                total, gradient = self._compute.row_loss(op, logits, flat, targets, row_loss)
            self._run.finish(op)
        return total, gradient.view_as(states)

    def loss_backward(self, turn: Turn, state_gradient: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Scale the head's gradients by that of the loss, and send those of its parameters off."""
        with self._ticking():
            self._steps.begin_backward(turn)
            op = self._run.advance("backward", self.head)
            self._compute.scale_loss(op, state_gradient, scale)
            self._run.finish(op)
        return state_gradient

    def infer_loss(
        self,
        logits: Logits,
        states: torch.Tensor,
        targets: Targets,
        normaliser: float | torch.Tensor | None,
        row_loss: RowLoss | None = None,
    ) -> torch.Tensor:
        """The loss without gradients."""
        flat = states.reshape(-1, states.shape[-1])
        if row_loss is not None:
            return row_loss(self.infer(self.head, row_log_probabilities, (logits, flat, *targets), {}))
        total = self.infer(self.head, loss_only, (logits, flat, targets.rows, targets.tokens), {})
        return total / _count(targets, normaliser)  # type: ignore[no-any-return]

    def _begin_pass(self, begin: Callable[[], None]) -> None:
        if self._fresh:
            self._fresh = False
            begin()

    # ---- the step as a whole

    @property
    def accumulation(self) -> int:
        """Micro-batches that a step is foreseen to have."""
        return self._steps.accumulation

    @accumulation.setter
    def accumulation(self, micro_batches: int) -> None:
        if micro_batches != self._steps.accumulation:
            self._steps.forget_orders()
        self._steps.accumulation = micro_batches

    @property
    def open_ended(self) -> bool:
        """Whether nobody says how many micro-batches a step has."""
        return self._steps.open_ended

    @open_ended.setter
    def open_ended(self, value: bool) -> None:
        self._steps.open_ended = value

    not_finite: Sequence[str] = ()
    """Units whose gradient of the last step was not finite, in the order of the forward."""

    def gradient_squares(self) -> float:
        """Sum of the squares of all gradients, when the last has arrived. Raises ProgramError if there are none."""
        with self._ticking(keeps=True):
            self._steps.begin_norms()
        squares = self._transfers.in_flight.squares
        return sum(squares[unit] for unit in sorted(squares))

    def finish_step(self, scale: float = 1.0) -> Any:
        """End the step: what clipping decided for ``scale`` x the gradients. Raises ProgramError if there are none."""
        squares = self.gradient_squares()
        by_unit = sorted(self._transfers.in_flight.squares.items())
        self.not_finite = [self.units[unit].name for unit, sum_ in by_unit if not math.isfinite(sum_)]
        self._steps.finish()
        assert self.optimizer is not None, "a step is only taken with an optimizer"
        return self.optimizer.clip(scale**2 * squares)

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has begun since the last step."""
        return self._steps.has_gradients

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that was not taken."""
        if self.has_gradients:
            self.abandon()

    def start_updates(self, update: PendingUpdate) -> None:
        """Start the updates of the step that was finished."""
        assert self._steps.whole is not None, "a step was finished"
        self._steps.updates.start(self._steps.whole, self._run, update)

    def flush(self) -> None:
        """Return when every update has been applied."""
        self._steps.updates.wait()

    def last_update(self, unit: int) -> Event:
        """The end of the unit's last update; one that has ended when there was none."""
        return self._steps.updates.last_of(unit, self._steps.whole)

    def before_update(self, wait: Callable[[str, int], None]) -> None:
        """Have every update call ``wait`` with unit and step before it begins, on the stream that runs it."""
        self._transfers.before_update = wait

    def weights_owner(self, unit: int) -> int:
        """The unit whose weights this one uses."""
        return self._owner[unit]

    def weights_change(self) -> None:
        """Somebody is about to write weights: forwards before that have no backward, and what was loaded is stale."""
        self.flush()
        with self._ticking():
            self._steps.weights_change()

    def wait_for_gradients(self) -> None:
        """Return when every gradient of the step has arrived on the host."""
        self._run.wait_for_all()

    def abandon(self) -> None:
        """Give up the step that is under way; weights stay as they were before it."""
        self._fresh = False
        self._steps.abandon()

    def put_buffers_back(self) -> None:
        """Let buffers that forwards of the step under way have changed be what they were before it."""
        changed = self._transfers.in_flight.buffers
        for key in sorted(changed, key=lambda key: key[1], reverse=True):  # the first micro-batch has the last word
            for known in changed[key]:
                known.put_back()

    def release(self) -> None:
        """Give the device's memory back until `take`; everything that training needs is on the host by then."""
        self.flush()
        self.abandon()
        self._weights.close()
        self.device.give_back()

    def take(self) -> None:
        """Take the device's memory again. Raises OutOfMemory; nothing is held then."""
        with self.device.counting():
            try:
                self._weights.take()
            except BaseException as error:
                self.device.give_back()
                raised = failures.in_compute(error)
                if raised is error:
                    raise
                raise raised from error

    def close(self) -> None:
        """Give up what is under way and free everything but the weights."""
        self._give_up()
        self.device.close()

    def _give_up(self) -> None:
        self._steps.close()
        self._weights.close()
        self.device.give_back()

    @contextmanager
    def _ticking(self, *, keeps: bool = False) -> Iterator[None]:
        """Count device memory; give the step up if anything goes wrong (with ``keeps``, unless nothing was done)."""
        try:
            with self.device.counting(), outside_inference_mode():
                yield
        except BaseException as error:
            if not keeps or self._steps.has_gradients:
                self.abandon()
            raised = failures.in_compute(error)
            if raised is error:
                raise
            raise raised from error

    # ---- figures

    @property
    def stall_s(self) -> dict[str, float]:
        """Seconds for which compute waited for each stream, since the start."""
        return dict(self._run.stall_s)

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes that each stream moved, since the start."""
        return dict(self._run.moved_bytes)

    @property
    def activation_host_bytes(self) -> int:
        """Host memory held for boundaries and for gradients that wait to be added up."""
        return self._transfers.staging_bytes + self._steps.activation_host_bytes

    def host_gradients(self) -> list[torch.Tensor]:
        """The gradients that have host memory of their own."""
        gradients = [(i, unit.gradient) for i, unit in enumerate(self.units)]
        return [g for i, g in gradients if g is not None and not self._is_parked(i)]

    def gradient(self, unit: int) -> torch.Tensor | None:
        """A master's gradient on the host, flat; a copy where it is kept on NVMe. None before the first backward."""
        return self._transfers.parking.gradient_of(unit) if self._is_parked(unit) else self.units[unit].gradient

    def _is_parked(self, unit: int) -> bool:
        return self._steps.whole is not None and self._transfers.parking.holds_gradient_of(unit)


def _count(targets: Targets, normaliser: float | torch.Tensor | None) -> float | torch.Tensor:
    return max(1, len(targets.tokens)) if normaliser is None else normaliser
