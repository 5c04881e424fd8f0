"""Supervised fine-tuning: the cross-entropy of the answers' tokens."""

from __future__ import annotations

from pathlib import Path

from ..data import Batch, Prepared
from ..errors import InputError
from ..executor import Streamed
from .base import Evaluated, Forward


class Sft:
    """The mean over a step's supervised tokens, however the step is cut into micro-batches."""

    together = 1
    generates = True

    def check(self, data: Prepared) -> None:
        if data.report.pairs:
            raise InputError(
                "the rows are preference pairs, which train.objective: sft does not learn from",
                hint="set train.objective to dpo",
            )

    def begin(self, streamed: Streamed, data: Prepared, folder: Path, pad_id: int) -> None:
        """Nothing needs to be known."""

    def forward(self, streamed: Streamed, part: Batch, step: Batch) -> Forward:
        return Forward(streamed.model(**part.inputs(), num_items_in_batch=max(1, step.supervised)).loss)

    def evaluate(self, streamed: Streamed, batch: Batch) -> Evaluated:
        return Evaluated(streamed.model(**batch.inputs(), num_items_in_batch=1).loss.item(), batch.supervised)
