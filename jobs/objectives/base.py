"""What an objective is to the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from ..data import Batch, Prepared
from ..executor import Streamed


@dataclass(frozen=True)
class Forward:
    """What the forward of one micro-batch came to."""

    loss: torch.Tensor
    """Scalar, its share of the step's loss, ready for backward."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Shares of the step's other figures: those of all micro-batches are added up."""


@dataclass(frozen=True)
class Evaluated:
    """A loss and what it is a mean over."""

    total: float
    count: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Totals of other figures, over the same count."""


class Objective(Protocol):
    """A loss on batches of rows."""

    together: int
    """Sequences that follow each other and never part: 2 of a preference pair, else 1."""
    generates: bool
    """Whether generated answers are compared with those of the evaluation rows."""

    def check(self, data: Prepared) -> None:
        """Raise InputError when the rows are not of the kind that it learns from."""

    def begin(self, streamed: Streamed, data: Prepared, folder: Path, pad_id: int) -> None:
        """Find out, before the first step, what must be known of the start weights; or read it from ``folder``."""

    def forward(self, streamed: Streamed, part: Batch, step: Batch) -> Forward:
        """Run a micro-batch ``part`` of the batch ``step``."""

    def evaluate(self, streamed: Streamed, batch: Batch) -> Evaluated:
        """The loss of evaluation rows, without gradients."""
