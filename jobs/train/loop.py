"""The loop: step after step until the rows, the time or the patience end."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..checkpoint import Checkpoint, random_state, set_random_state
from ..data import Batch, collate, pad_id
from ..executor import Streamed
from ..schedule import learning_rate
from ..tracking import SystemMetrics, Tracker
from .evaluation import Evaluation
from .pace import Pace, Stalls, step_metrics
from .pausing import Pause, pause_while_asked
from .position import Position
from .saving import REST, Saver
from .setup import OnPoint, Setup
from .stopping import StopRequested
from .switching import switch_if_told
from .tracing import Tracing

Progress = Callable[[Mapping[str, float]], None]


@dataclass
class State:
    """What a run knows of itself beside weights and optimizer: all of it goes into every checkpoint."""

    position: Position = field(default_factory=Position)
    loss: float = float("nan")
    exact_match_before: float | None = None
    eval_losses: list[list[float]] = field(default_factory=list)
    """``[step, loss]`` of every evaluation."""
    spent_s: float = 0.0
    rng: dict[str, Any] = field(default_factory=random_state)
    """Random generators after the last step."""

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and loss of the best evaluation, the first of equal ones."""
        finite = [(int(step), loss) for step, loss in self.eval_losses if math.isfinite(loss)]
        return min(finite, key=lambda pair: pair[1], default=None)


class Loop:
    """Trains a streamed model as its setup says."""

    def __init__(
        self,
        setup: Setup,
        streamed: Streamed,
        saver: Saver,
        tracker: Tracker,
        stop: Callable[[], bool],
        pause: Pause,
        progress: Progress,
        on_point: OnPoint,
    ) -> None:
        self.setup, self.streamed, self.saver = setup, streamed, saver
        self._tracker, self._stop, self._progress, self._on_point = tracker, stop, progress, on_point
        self._pause = pause
        self._order = setup.order()
        self.state = State()
        self._system = SystemMetrics(setup.directory.path)
        self.evaluation = Evaluation(setup, streamed)
        predicted = setup.policy.predicted
        self._tracing = Tracing(streamed, setup.directory)
        self.pace = Pace(predicted.step_s if predicted else None)
        self._saved: tuple[int, int] = (0, 0)
        """Step of the last save, and evaluations until then."""
        if setup.checkpoint is not None:
            self._take_up(setup.checkpoint)
            on_point("resumed")
        self.total_steps = self._count_steps()

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.state.position.steps

    def run(self) -> None:
        """Train to the end, from where the state stands. Raises StopRequested when it is to stop before."""
        self._started = time.monotonic()
        setup = self.setup
        setup.objective.begin(self.streamed, setup.data, setup.directory.path, pad_id(setup.tokenizer))
        self.streamed.model.train()  # a model that was loaded is in evaluation mode, where nothing is dropped
        if self.evaluation.generates and not self.step and self.state.exact_match_before is None:
            self.state.exact_match_before = self.evaluation.exact_match(self.setup.directory.verdicts).rate
            self.report({"exact_match": self.state.exact_match_before})
        if self._evaluate_if_due():  # a stop may have come between the step and its evaluation
            self.save()
        while not self._ended():
            for rows, left in self._order.remaining(self.state.position):
                if self._ended():
                    break
                self._take_step(rows, left)
                if self._stop() or self._out_of_time():
                    raise StopRequested
                self._pause_if_asked()
                self._switch_if_told()
        self.save()
        self.saver.wait()

    def _pause_if_asked(self) -> None:
        """Between two steps; what follows the last one needs the device."""
        began = time.monotonic()
        try:
            if not self._ended():
                pause_while_asked(self.streamed, self._pause, self._stop)
        finally:
            self._started += time.monotonic() - began  # it is no time that the job has spent

    def _switch_if_told(self) -> None:
        policy = switch_if_told(self.streamed, self.setup.directory)
        if policy is not None:
            self.setup.policy = policy
            self._tracing.forget()
            self.pace = Pace(policy.predicted.step_s if policy.predicted else None)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Tell tracker and progress."""
        self._tracker.log(self.step, metrics)
        extra = {}
        eta_s = self.pace.eta_s(self.total_steps - self.step)
        if eta_s is not None:
            extra["eta_s"] = eta_s
        self._progress({"step": float(self.step), "total_steps": float(self.total_steps), **extra, **metrics})

    # ---- one step

    def _take_step(self, rows: list[int], left: int) -> None:
        started, stalls = time.perf_counter(), Stalls(self.streamed)
        self._tracing.begin()
        batch = self._collated(rows)
        loss, figures = self._gradients(batch)
        self._on_point("step")
        rate = learning_rate(self.setup.spec.train, self.step + 1, self.total_steps)
        result = self.streamed.step(lr=rate)
        self.state.position.advance(left)
        self.state.loss, self.state.rng = loss, random_state()
        self._on_point("stepped")
        seconds = time.perf_counter() - started
        self.pace.add(batch, seconds)
        waited = stalls.read()
        self._tracing.end(self.step, waited)
        self.report(
            {
                "loss": loss,
                **figures,
                "learning_rate": rate,
                **step_metrics(self.streamed, batch, result, seconds),
                **waited,
                "stall_save_s": self.saver.stall_s,
                **self._system.read(),
            }
        )
        self._after_step()

    def _after_step(self) -> None:
        self.saver.check()
        if self._evaluate_if_due() or self.step % self.setup.spec.output.save_every == 0:
            self.save()

    def _evaluate_if_due(self) -> bool:
        """Take the evaluation loss where its turn has come; whether it is the best so far."""
        every = self.setup.batches_between_evaluations
        losses = self.state.eval_losses
        due = self.step > 0 and (self.step % every == 0 or self.step == self.total_steps)
        if not (self.evaluation and due) or (losses and losses[-1][0] == self.step):
            return False
        self._on_point("evaluating")
        measured = self.evaluation.loss()
        loss = measured["eval_loss"]
        losses.append([self.step, loss if math.isfinite(loss) else math.inf])  # NaN has no place in an order
        self.report(measured)
        return self.state.best == (self.step, losses[-1][1])

    def _collated(self, rows: list[int]) -> Batch:
        return collate(
            self.setup.data.train,
            rows,
            pad_id(self.setup.tokenizer),
            pack_length=self.setup.policy.sequence_length if self.setup.packed else None,
        )

    def _gradients(self, batch: Batch) -> tuple[float, dict[str, float]]:
        """Forward and backward of all micro-batches; the step's loss and what else the objective knows of it."""
        parts = list(batch.split(self.setup.micro_batch))
        self.streamed.accumulation = len(parts)
        losses, figures = list[torch.Tensor](), Counter[str]()
        for part in parts:
            self._on_point("forward")
            output = self.setup.objective.forward(self.streamed, part, batch)
            self._on_point("backward")
            output.loss.backward()
            losses.append(output.loss.detach())
            figures.update(output.metrics)  # adds
        return sum(loss.item() for loss in losses), dict(figures)  # asking earlier would wait for the GPU each time

    # ---- when it ends

    def _count_steps(self) -> int:
        section = self.setup.spec.train
        steps = self._order.steps(self.state.position, section.epochs)
        return min(steps, section.max_steps or steps)

    def _ended(self) -> bool:
        return self.step >= self.total_steps or self._no_longer_learning()

    def _no_longer_learning(self) -> bool:
        """Whether the last ``train.patience`` evaluations have not lowered the evaluation loss."""
        patience, losses = self.setup.spec.train.patience, [loss for _, loss in self.state.eval_losses]
        if patience is None or len(losses) <= patience:
            return False
        return min(losses[-patience:]) >= min(losses[:-patience])

    def _out_of_time(self) -> bool:
        """Whether ``queue.max_duration`` has passed, counting the time before the last checkpoint too."""
        limit = self.setup.spec.queue.max_duration
        return limit is not None and self._spent_s() >= limit

    def _spent_s(self) -> float:
        return self.state.spent_s + time.monotonic() - self._started

    # ---- checkpoints

    def save(self) -> None:
        """Begin to save the state after the last step, unless it is saved or no step was taken."""
        if self._saved == (self.step, len(self.state.eval_losses)) or not self.step:
            return
        self._on_point("saving")
        state, setup = self.state, self.setup
        last = state.eval_losses[-1] if state.eval_losses else None
        trainer = {
            "position": state.position.to_dict(),
            "optimizer_steps": self.streamed.steps,
            "loss": _finite(state.loss),
            "exact_match_before": state.exact_match_before,
            "eval_losses": [[step, _finite(loss)] for step, loss in state.eval_losses],
            "spent_s": self._spent_s(),
            "rng": state.rng,
            "batch": setup.batch,
            "packed": setup.packed,
            "policy": setup.policy_digest,
            "base": setup.base,
            "layouts": self.streamed.layouts(),
        }
        self.saver.save(self.step, trainer, score=_finite(last[1]) if last and last[0] == self.step else None)
        self._saved = (self.step, len(state.eval_losses))

    def _take_up(self, checkpoint: Checkpoint) -> None:
        for name in checkpoint.units:
            if name == REST:
                self.streamed.load_rest(checkpoint.unit(name))
            else:
                self.streamed.load_unit_state(name, checkpoint.unit(name))
        trainer = checkpoint.trainer
        self.state = State(
            position=Position.from_dict(trainer["position"]),
            loss=math.nan if trainer["loss"] is None else trainer["loss"],
            exact_match_before=trainer["exact_match_before"],
            eval_losses=[[step, math.inf if loss is None else loss] for step, loss in trainer["eval_losses"]],
            spent_s=trainer["spent_s"],
            rng=trainer["rng"],
        )
        self.streamed.steps = trainer["optimizer_steps"]
        self._saved = (self.step, len(self.state.eval_losses))
        set_random_state(trainer["rng"])


def _finite(value: float) -> float | None:
    """JSON has neither infinity nor NaN."""
    return value if math.isfinite(value) else None
