"""What is measured on the evaluation rows while a run goes on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..data import collate, pad_id
from ..errors import OutOfMemory
from ..evaluate import ExactMatch, exact_match
from ..executor import Streamed, resident
from ..generate import GREEDY, Sampling, generate
from .setup import Setup

log = logging.getLogger(__name__)

EVAL_LOSS_ROWS = 256
"""Rows of the fixed sample on which the evaluation loss is taken."""


class Evaluation:
    """Loss and exact match of a streamed model on a job's evaluation rows."""

    def __init__(self, setup: Setup, streamed: Streamed) -> None:
        self._setup, self._streamed = setup, streamed
        self._rows = setup.data.eval

    def __bool__(self) -> bool:
        return len(self._rows) > 0

    @property
    def generates(self) -> bool:
        """Whether generated answers are compared with those of the rows."""
        return bool(self) and self._setup.objective.generates

    def loss(self) -> dict[str, float]:
        """``eval_loss`` and what else the objective measures: means over a sample that is always the same."""
        totals, count = Counter[str](), 0.0
        size, padding = self._setup.micro_batch, pad_id(self._setup.tokenizer)
        with evaluating(self._streamed):
            for start in range(0, min(len(self._rows), EVAL_LOSS_ROWS), size):
                rows = range(start, min(start + size, len(self._rows), EVAL_LOSS_ROWS))
                found = self._setup.objective.evaluate(self._streamed, collate(self._rows, rows, padding))
                totals.update({"eval_loss": found.total, **{f"eval_{k}": v for k, v in found.metrics.items()}})
                count += found.count
        return {name: total / max(1.0, count) for name, total in totals.items()}

    def exact_match(self, verdicts: Path) -> ExactMatch:
        """Generate for the rows that the job asks for, and write every row's verdict."""
        section = self._setup.spec.evaluate
        with evaluating(self._streamed):
            match = exact_match(self._predict, self._rows, marker=section.answer, limit=section.limit)
        match.save(verdicts)
        return match

    def _predict(self, prompts: list[str]) -> list[str]:
        section = self._setup.spec.evaluate
        return answers(
            self._streamed,
            self._setup.tokenizer,
            prompts,
            max_new_tokens=section.max_new_tokens,
            batch=section.batch,
            sampling=Sampling(section.temperature, section.top_p, section.seed),
        )


def answers(
    streamed: Streamed,
    tokenizer: Any,
    prompts: list[str],
    *,
    max_new_tokens: int,
    batch: int,
    sampling: Sampling = GREEDY,
) -> list[str]:
    """What the model writes after each prompt: from the device's memory where the weights fit, else streamed.

    Where the device has no room for ``batch`` rows, fewer run at once.
    """

    def write(rows: int) -> list[str]:
        return generate(
            streamed.model, tokenizer, prompts, max_new_tokens=max_new_tokens, batch=rows, sampling=sampling
        )

    try:
        with resident(streamed):
            return write(batch)
    except (OutOfMemory, torch.OutOfMemoryError):
        log.info("the weights and %d rows do not fit the device together: weights are streamed", batch)
    while True:
        try:
            return write(batch)
        except (OutOfMemory, torch.OutOfMemoryError):
            if batch == 1:
                raise
            batch //= 2


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
