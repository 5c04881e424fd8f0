"""One training run in this process: the loop around the streamed model.

Everything that decides what is learned is a pure function of the job file and the step: learning rate, order of the
rows, dropout. So a run that was killed goes on from its last checkpoint to the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checkpoint import Checkpoint, CheckpointStore, random_state, set_random_state
from .data import Batch, batches, packing_problem, pad_id, prepare
from .errors import InputError, OutOfMemory
from .evaluate import ExactMatch, exact_match
from .executor import Emulated, Streamed, stream
from .executor.streamed import StepResult
from .frozen import Frozen
from .generate import generate
from .introspect import model_facts
from .model import load_model
from .model_facts import ModelFacts
from .optim import HybridAdamW
from .policy import Home, Policy
from .run_directory import RunDirectory, save_record
from .schedule import learning_rate
from .spec import JobSpec
from .tracking import LocalTracker, Tracker

DEFAULT_MICRO_BATCH = 8
EVAL_LOSS_ROWS = 256
"""Rows of the fixed sample on which the evaluation loss is taken."""

Progress = Callable[[Mapping[str, float]], None]


class Result(Frozen):
    """What a run came to."""

    status: str
    """``done``, or ``stopped`` when it was asked to stop before the end (it can be resumed)."""
    steps: int
    loss: float
    """Loss of the last step."""
    exact_match_before: float | None
    exact_match: float | None
    """None without evaluation rows, or when the run was stopped."""
    tokens_per_s: float
    """Tokens that are no padding per second, over this process's steps."""
    step_s: float
    """Median seconds of a step, over this process's steps."""
    predicted_step_s: float | None
    peak_gpu_bytes: int
    host_bytes: int
    run_dir: str


def train(
    spec: JobSpec,
    *,
    policy: Policy | None = None,
    device: str | Emulated = "auto",
    run_dir: str | Path | None = None,
    tracker: Tracker | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Run the job to its end, or from its last checkpoint on.

    Without a ``policy`` every boundary waits on the host. ``stop`` is asked after every step; ``progress`` gets every
    report that goes to the tracker. Raises the typed errors of `errors`; InputError and its kin before the first step.
    """
    directory = RunDirectory(Path(run_dir or spec.output.dir))
    with directory.claimed(spec):
        tracker = tracker or LocalTracker(directory.path)
        try:
            run = _Run(spec, policy, device, directory, tracker, stop or (lambda: False), progress or (lambda _: None))
            result = run.run()
        except KeyboardInterrupt:
            tracker.finish("KILLED")
            raise
        except BaseException:
            tracker.finish("FAILED")
            raise
        tracker.finish("FINISHED" if result.status == "done" else "KILLED")
    return result


@dataclass
class _Run:
    spec: JobSpec
    policy: Policy | None
    device: str | Emulated
    directory: RunDirectory
    tracker: Tracker
    stop: Callable[[], bool]
    progress: Progress

    def run(self) -> Result:
        torch.manual_seed(self.spec.train.seed)
        self.store = CheckpointStore(self.directory.checkpoints, keep=self.spec.output.keep)
        model, self.tokenizer = load_model(self.spec.model)
        self.data = prepare(self.spec.data, self.tokenizer, cache=self.directory.rows)
        self._decide_packing(model)
        facts, self.policy = self._policy(model)
        self.policy.save(self.directory.policy)
        self._count_steps()
        with stream(
            model,
            self.policy,
            device=self.device,
            optimizer=self._optimizer(),
            facts=facts,
            nvme_directory=self.spec.plan.nvme,
        ) as self.streamed:
            return self._train()

    def _decide_packing(self, model: Any) -> None:
        """Pack where the model keeps rows apart. Raises InputError where packing is required and it does not."""
        wanted, report = self.spec.data.packing, self.data.report
        problem = packing_problem(model) if wanted else None
        if problem is not None and wanted == "required":
            raise InputError(f"rows cannot be packed: {problem}", hint="set data.packing to true or false")
        report.packed = bool(wanted) and problem is None
        report.packing_refused = problem or ""

    def _policy(self, model: Any) -> tuple[ModelFacts, Policy]:
        """The policy, and the model's facts at its batch shape."""
        longest = self.data.train.longest
        policy = self.policy
        if policy is not None and policy.sequence_length < longest:
            raise InputError(
                f"the policy is for {policy.sequence_length} tokens a row, the data has a row of {longest}",
                hint="plan again, or set data.max_length",
            )
        batch = self.spec.train.batch
        facts = model_facts(
            model,
            micro_batch=policy.micro_batch if policy else DEFAULT_MICRO_BATCH if batch == "auto" else batch,
            sequence_length=policy.sequence_length if policy else longest,
            dtype=self.spec.model.dtype,
        )
        homes: list[Home] = ["host" for _ in facts.layers]
        return facts, policy or Policy.from_homes(facts, [*homes, "gpu"])

    def _count_steps(self) -> None:
        assert self.policy is not None
        batch = self.spec.train.batch
        self.batch = self.policy.micro_batch * self.policy.accumulation if batch == "auto" else batch
        self.steps_per_epoch = -(-len(self.data.train) // self.batch)
        steps = self.steps_per_epoch * self.spec.train.epochs
        self.total_steps = min(steps, self.spec.train.max_steps or steps)

    def _optimizer(self) -> HybridAdamW:
        return HybridAdamW(
            lr=self.spec.train.learning_rate,
            weight_decay=self.spec.train.weight_decay,
            max_grad_norm=self.spec.train.max_grad_norm,
            **self.spec.optimizer.arguments(),
        )

    # ---- the loop

    def _train(self) -> Result:
        self.loss, self.tokens = float("nan"), 0
        self.times: list[float] = []
        self.before: float | None = None
        self.saved_at = -1
        self.eval_losses: list[float] = []
        self.spent_s = 0.0
        checkpoint = self.store.latest()
        if checkpoint is not None:
            self._resume(checkpoint)
        elif len(self.data.eval):
            self.before = self._exact_match().rate
            self._report(0, {"exact_match": self.before})
        self.started = time.monotonic()
        for batch in self._remaining():
            self._step(batch)
            if self.stop() or self._out_of_time():
                self._save()
                return self._result("stopped", None)
        self._save()
        return self._finish()

    def _remaining(self) -> Iterator[Batch]:
        """The batches of every step that has not been taken."""
        assert self.policy is not None
        while not self._ended():
            epoch, skip = divmod(self.position, self.steps_per_epoch)
            for batch in batches(
                self.data.train, batch=self.batch, seed=self.spec.train.seed, epoch=epoch,
                pad_id=pad_id(self.tokenizer), skip=skip, buckets=not self.data.report.packed,
                pack_length=self.policy.sequence_length if self.data.report.packed else None,
            ):  # fmt: skip
                if self._ended():
                    return
                yield batch

    def _ended(self) -> bool:
        return self.position >= self.total_steps or self._no_longer_learning()

    position = 0
    """Batches used so far: steps taken and steps skipped for a gradient that was not finite."""

    def _step(self, batch: Batch) -> None:
        started = time.perf_counter()
        self.position += 1
        rate = learning_rate(self.spec.train, self.position, self.total_steps)
        stalls = self.streamed.stall_s()
        self.loss = self._gradients(batch)
        result = self.streamed.step(lr=rate)
        seconds = time.perf_counter() - started
        self.times.append(seconds)
        self.tokens += batch.tokens
        self._report(self.position, self._step_metrics(batch, result, rate, seconds, stalls))
        every = max(1, round(self.spec.evaluate.every * self.steps_per_epoch))
        if len(self.data.eval) and (self.position % every == 0 or self.position == self.total_steps):
            self.eval_losses.append(self._eval_loss())
            self._report(self.position, {"eval_loss": self.eval_losses[-1]})
        if self.position % self.spec.output.save_every == 0:
            self._save()

    def _out_of_time(self) -> bool:
        """Whether ``queue.max_duration`` has passed, counting the time before the last checkpoint too."""
        limit = self.spec.queue.max_duration
        return limit is not None and self.spent_s + time.monotonic() - self.started >= limit

    def _no_longer_learning(self) -> bool:
        """Whether the last ``train.patience`` evaluations have not lowered the evaluation loss."""
        patience = self.spec.train.patience
        if patience is None or len(self.eval_losses) <= patience:
            return False
        return min(self.eval_losses[-patience:]) >= min(self.eval_losses[:-patience])

    def _gradients(self, batch: Batch) -> float:
        """Forward and backward of all micro-batches; the loss is the mean over the step's supervised tokens."""
        assert self.policy is not None
        parts = list(split(batch, self.policy.micro_batch))
        self.streamed.accumulation = len(parts)
        loss = 0.0
        for part in parts:
            output = self.streamed.model(**part, num_items_in_batch=max(1, batch.supervised))
            output.loss.backward()
            loss += output.loss.item()
        return loss

    def _step_metrics(
        self, batch: Batch, result: StepResult, rate: float, seconds: float, stalls: Mapping[str, float]
    ) -> dict[str, float]:
        assert self.policy is not None
        metrics = {
            "loss": self.loss,
            "learning_rate": rate,
            "grad_norm": result.grad_norm,
            "clip_scale": result.clip_scale,
            "tokens_per_s": batch.tokens / seconds,
            "supervised_tokens_per_s": batch.supervised / seconds,
            "tflops_6n": 6e-12 * self.streamed.facts.parameters * batch.tokens / seconds,
            "step_s": seconds,
            "gpu_bytes": float(self.streamed.device.peak_bytes),
            "host_bytes": float(sum(self.streamed.host_bytes().values())),
        }
        if self.policy.predicted is not None:
            metrics["predicted_step_s"] = self.policy.predicted.step_s
        now = self.streamed.stall_s()
        for name, streams in (
            ("h2d", ["h2d"]),
            ("d2h", ["d2h"]),
            ("cpu", ["cpu"]),
            ("nvme", ["nvme_read", "nvme_write"]),
        ):
            metrics[f"stall_{name}_s"] = sum(now.get(s, 0.0) - stalls.get(s, 0.0) for s in streams)
        return metrics

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        self.tracker.log(step, metrics)
        self.progress({"step": float(step), "total_steps": float(self.total_steps), **metrics})

    # ---- evaluation

    def _eval_loss(self) -> float:
        assert self.policy is not None
        sample = self.data.eval.take(range(min(len(self.data.eval), EVAL_LOSS_ROWS)))
        total = supervised = 0.0
        with evaluating(self.streamed):
            for batch in batches(sample, batch=self.policy.micro_batch, seed=0, epoch=0, pad_id=pad_id(self.tokenizer)):
                total += self.streamed.model(**batch.inputs(), num_items_in_batch=1).loss.item()
                supervised += batch.supervised
        return total / max(1.0, supervised)

    def _exact_match(self) -> ExactMatch:
        section = self.spec.evaluate
        with evaluating(self.streamed):
            match = exact_match(self._predict, self.data.eval, marker=section.answer, limit=section.limit)
        match.save(self.directory.verdicts)
        return match

    def _predict(self, prompts: list[str]) -> list[str]:
        """Generate, with fewer rows at once where the device has no room for as many."""
        section, batch = self.spec.evaluate, self.spec.evaluate.batch
        while True:
            try:
                return generate(
                    self.streamed.model, self.tokenizer, prompts, max_new_tokens=section.max_new_tokens, batch=batch
                )
            except (OutOfMemory, torch.OutOfMemoryError):
                if batch == 1:
                    raise
                batch //= 2

    # ---- checkpoints and the end

    def _save(self) -> None:
        if self.saved_at == self.position:
            return
        trainer = {
            "position": self.position,
            "optimizer_steps": self.streamed.steps,
            "loss": self.loss,
            "exact_match_before": self.before,
            "eval_losses": self.eval_losses,
            "spent_s": self.spent_s + time.monotonic() - self.started,
            "rng": random_state(),
        }
        self.store.save(self.position, self.streamed.unit_states(), trainer)
        self.saved_at = self.position

    def _resume(self, checkpoint: Checkpoint) -> None:
        for name in checkpoint.units:
            self.streamed.load_unit_state(name, checkpoint.unit(name))
        trainer = checkpoint.trainer
        self.position = self.saved_at = trainer["position"]
        self.streamed.steps, self.loss = trainer["optimizer_steps"], trainer["loss"]
        self.before = trainer["exact_match_before"]
        self.eval_losses, self.spent_s = list(trainer["eval_losses"]), trainer["spent_s"]
        set_random_state(trainer["rng"])

    def _finish(self) -> Result:
        after = None
        if len(self.data.eval):
            after = self._exact_match().rate
            self._report(self.position, {"exact_match": after})
        self.streamed.model.save_pretrained(self.directory.model, state_dict=self.streamed.state_dict())
        self.tokenizer.save_pretrained(self.directory.model)
        result = self._result("done", after)
        save_record(self.directory.result, result)
        for path in (self.directory.spec, self.directory.policy, self.directory.result):
            self.tracker.artifact(path)
        return result

    def _result(self, status: str, after: float | None) -> Result:
        assert self.policy is not None
        times = sorted(self.times) or [0.0]
        return Result(
            status=status,
            steps=self.position,
            loss=self.loss,
            exact_match_before=self.before,
            exact_match=after,
            tokens_per_s=self.tokens / sum(times) if self.times else 0.0,
            step_s=times[len(times) // 2],
            predicted_step_s=self.policy.predicted.step_s if self.policy.predicted else None,
            peak_gpu_bytes=self.streamed.device.peak_bytes,
            host_bytes=sum(self.streamed.host_bytes().values()),
            run_dir=str(self.directory.path),
        )


def split(batch: Batch, sequences: int) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of at most so many sequences, each cut to its own longest one."""
    for start in range(0, len(batch.input_ids), sequences):
        part = slice(start, start + sequences)
        width = int(batch.attention_mask[part].sum(dim=1).max())
        yield {name: tensor[part, :width] for name, tensor in batch.inputs().items()}


@contextmanager
def evaluating(streamed: Streamed) -> Iterator[None]:
    """The streamed model with all updates applied, in evaluation mode, without gradients."""
    streamed.flush()
    streamed.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        streamed.model.train()
