"""How fast a run goes, as its metrics and its progress line tell it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data import Batch
from ..executor import Streamed
from ..executor.streamed import StepResult

_STREAMS = {"h2d": ["h2d"], "d2h": ["d2h"], "cpu": ["cpu"], "nvme": ["nvme_read", "nvme_write"]}
_SURE_AFTER = 10
"""Measured steps that count as much as ten times the prediction does."""


class Pace:
    """Seconds and tokens of the steps that this process has taken."""

    def __init__(self, predicted_step_s: float | None) -> None:
        self.predicted_step_s = predicted_step_s
        self.times: list[float] = []
        self.tokens = 0

    def add(self, batch: Batch, seconds: float) -> None:
        """A step was taken."""
        self.times.append(seconds)
        self.tokens += batch.tokens

    @property
    def step_s(self) -> float:
        """Median seconds of a step; 0 before the first."""
        return sorted(self.times)[len(self.times) // 2] if self.times else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens that are no padding per second of stepping; 0 before the first step."""
        return self.tokens / sum(self.times) if self.times else 0.0

    def eta_s(self, steps: int) -> float | None:
        """Seconds that ``steps`` more will take: the plan's prediction, drawn to the measured time step by step.

        None when nothing was predicted and no step was taken.
        """
        if not self.times:
            return None if self.predicted_step_s is None else steps * self.predicted_step_s
        measured = sum(self.times) / len(self.times)
        if self.predicted_step_s is None:
            return steps * measured
        share = min(1.0, len(self.times) / _SURE_AFTER)
        return steps * (share * measured + (1 - share) * self.predicted_step_s)


class Stalls:
    """Seconds for which compute waited for each link, from one reading to the next."""

    def __init__(self, streamed: Streamed) -> None:
        self._streamed, self._before = streamed, streamed.stall_s()

    def read(self) -> dict[str, float]:
        """Metrics of the time since the last reading."""
        now, before = self._streamed.stall_s(), self._before
        self._before = now
        return {
            f"stall_{name}_s": sum(now.get(stream, 0.0) - before.get(stream, 0.0) for stream in streams)
            for name, streams in _STREAMS.items()
        }


def step_metrics(streamed: Streamed, batch: Batch, result: StepResult, seconds: float) -> dict[str, float]:
    """What one step is known by, beside its loss and its learning rate."""
    metrics: dict[str, Any] = {
        "grad_norm": result.grad_norm,
        "clip_scale": result.clip_scale,
        "tokens_per_s": batch.tokens / seconds,
        "supervised_tokens_per_s": batch.supervised / seconds,
        "tflops_6n": 6e-12 * streamed.facts.parameters * batch.tokens / seconds,
        "step_s": seconds,
        "gpu_bytes": float(streamed.device.peak_bytes),
        "host_bytes": float(sum(streamed.host_bytes().values())),
    }
    predicted = streamed.policy.predicted
    return metrics if predicted is None else {**metrics, "predicted_step_s": predicted.step_s}


def shown(record: Mapping[str, float]) -> str:
    """The progress line's words for a report of a step."""
    words = [f"loss {record['loss']:.3f}", f"{record['tokens_per_s']:,.0f} tokens/s"]
    if "eta_s" in record:
        words.append(f"{_clock(record['eta_s'])} left")
    return ", ".join(words)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
