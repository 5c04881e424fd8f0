"""One probe of the batch search: a few real steps through a plan, in a process that does nothing else."""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import dataclass

import torch

from ..jobs.data import IGNORED, Batch, Rows, worst_batch
from ..jobs.errors import LazytrainError, OutOfMemory
from ..jobs.executor import Emulated, Streamed, stream
from ..jobs.learning import select_learning
from ..jobs.model import load_model
from ..jobs.model_facts import ModelFacts
from ..jobs.optim import HybridAdamW
from ..jobs.policy import Policy
from ..jobs.spec import JobSpec
from .logs import quiet_libraries

_WARM_UP_STEPS = 2
_LEAST_STEPS = 3
_SETTLED = 0.01
"""Standard error of a median step that is small enough."""
_PATIENCE = 3.0
"""So many times as long as usual is measured where it is not."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What every probe of one search has in common."""

    spec: JobSpec
    device: str | Emulated
    rows: Rows
    """The longest rows of the training data, as many as the largest batch has."""
    seconds: float = 4.0
    """Steps are measured for at least this long, and for three times as long while they differ."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one probe found; the numbers are zero unless it fits."""

    fits: bool
    reason: str = ""
    """Why it does not fit."""
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    """Median over the steps after the warm-up."""
    spread: float = 0.0
    """Standard error of that median, as a share of it."""
    steps: int = 0
    loss: float = 0.0
    """Of the last step."""
    peak_device_bytes: int = 0
    pid: int = 0
    """The process it ran in."""


def run_probe(order: Order, policy: Policy, facts: ModelFacts) -> Report:
    """Train the worst batch for a few steps. Being out of memory is a result, not an error.

    Raises LazytrainError when the steps ran but trained nothing (no step taken, loss not finite).
    """
    quiet_libraries()
    try:
        return _train(order, policy, facts)
    except (OutOfMemory, torch.OutOfMemoryError, MemoryError) as error:
        return Report(fits=False, reason=f"out of memory: {str(error).splitlines()[0]}", pid=os.getpid())


def _train(order: Order, policy: Policy, facts: ModelFacts) -> Report:
    model = select_learning(load_model(order.spec.model)[0], order.spec)
    batch = _with_padding(worst_batch(order.rows, policy.micro_batch))
    section = order.spec.train
    optimizer = HybridAdamW(lr=section.learning_rate, max_grad_norm=section.max_grad_norm)
    nvme = order.spec.plan.nvme
    with stream(model, policy, device=order.device, optimizer=optimizer, facts=facts, nvme_directory=nvme) as streamed:
        times, loss = _steps(streamed, batch, policy.accumulation, order.seconds)
        steps, peak = streamed.steps, streamed.device.peak_bytes
    if steps == 0 or not math.isfinite(loss):
        raise LazytrainError(
            f"the probe with batch {policy.micro_batch} did not train: {steps} steps, loss {loss}",
            hint="lower train.learning_rate or look at the longest rows of the data",
        )
    step_s = statistics.median(times)
    return Report(
        fits=True,
        tokens_per_s=batch.tokens * policy.accumulation / step_s,
        step_s=step_s,
        spread=standard_error(times),
        steps=steps,
        loss=loss,
        peak_device_bytes=peak,
        pid=os.getpid(),
    )


def _with_padding(batch: Batch) -> Batch:
    """The batch with its last position masked in one row: attention with a mask takes more memory than without."""
    if batch.supervised < 2:
        return batch
    mask, labels = batch.attention_mask.clone(), batch.labels.clone()
    mask[-1, -1], labels[-1, -1] = 0, IGNORED
    return Batch(batch.input_ids, mask, labels, int(mask.sum()), int((labels != IGNORED).sum()))


def _steps(streamed: Streamed, batch: Batch, accumulation: int, seconds: float) -> tuple[list[float], float]:
    """Seconds of each step after the warm-up, and the last loss."""
    inputs = {
        name: getattr(batch, name).to(streamed.device.torch_device)
        for name in ("input_ids", "attention_mask", "labels")
    }
    times: list[float] = []
    loss = math.nan
    first = before = time.perf_counter()
    for number in range(10**6):
        for _ in range(accumulation):
            output = streamed.model(**inputs)
            output.loss.backward()
            loss = output.loss.item()
        streamed.step()
        now = time.perf_counter()
        if number >= _WARM_UP_STEPS:
            times.append(now - before)
        elif number == _WARM_UP_STEPS - 1:
            first = now
        if len(times) >= _LEAST_STEPS and _told_enough(times, now - first, seconds):
            break
        before = now
    return times, loss


def _told_enough(times: list[float], spent_s: float, seconds: float) -> bool:
    """Whether the median is known well enough, or as well as it can be known in the time."""
    return spent_s >= _PATIENCE * seconds or (spent_s >= seconds and standard_error(times) <= _SETTLED)


def standard_error(times: list[float]) -> float:
    """Standard error of the median of these, as a share of it: 1.25 times that of the mean, as for normal values."""
    if len(times) < 2:
        return 0.0
    return math.sqrt(math.pi / 2 / len(times)) * statistics.stdev(times) / statistics.median(times)
