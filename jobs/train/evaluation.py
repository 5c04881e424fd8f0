"""What is measured on the evaluation rows while a run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..data import batches, pad_id
from ..errors import OutOfMemory
from ..evaluate import ExactMatch, exact_match
from ..executor import Streamed
from ..generate import generate
from .setup import Setup

EVAL_LOSS_ROWS = 256
"""Rows of the fixed sample on which the evaluation loss is taken."""


class Evaluation:
    """Loss and exact match of a streamed model on a job's evaluation rows."""

    def __init__(self, setup: Setup, streamed: Streamed) -> None:
        self._setup, self._streamed = setup, streamed
        self._rows = setup.data.eval

    def __bool__(self) -> bool:
        return len(self._rows) > 0

    def loss(self) -> float:
        """Mean over the supervised tokens of a sample that is always the same."""
        sample = self._rows.take(range(min(len(self._rows), EVAL_LOSS_ROWS)))
        total = supervised = 0.0
        padding = pad_id(self._setup.tokenizer)
        with evaluating(self._streamed):
            for batch in batches(sample, batch=self._setup.policy.micro_batch, seed=0, epoch=0, pad_id=padding):
                total += self._streamed.model(**batch.inputs(), num_items_in_batch=1).loss.item()
                supervised += batch.supervised
        return total / max(1.0, supervised)

    def exact_match(self, verdicts: Path) -> ExactMatch:
        """Generate for the rows that the job asks for, and write every row's verdict."""
        section = self._setup.spec.evaluate
        with evaluating(self._streamed):
            match = exact_match(self._predict, self._rows, marker=section.answer, limit=section.limit)
        match.save(verdicts)
        return match

    def _predict(self, prompts: list[str]) -> list[str]:
        """Generate, with fewer rows at once where the device has no room for as many."""
        section, batch = self._setup.spec.evaluate, self._setup.spec.evaluate.batch
        while True:
            try:
                return generate(
                    self._streamed.model,
                    self._setup.tokenizer,
                    prompts,
                    max_new_tokens=section.max_new_tokens,
                    batch=batch,
                )
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
