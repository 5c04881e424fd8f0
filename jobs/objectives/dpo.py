"""Direct preference optimization (Rafailov et al., NeurIPS 2023), with no second model.

    loss = -log sigmoid(beta ((log p(chosen) - log p0(chosen)) - (log p(rejected) - log p0(rejected))))

p0 are the start weights: their log-probabilities of all rows are taken once, by the same streamed model before the
first step, and kept with the run. The two rows of a pair follow each other in a batch and go through one forward.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import logsigmoid

from ..data import Batch, Prepared, Rows, collate
from ..errors import CheckpointError, InputError
from ..executor import Streamed
from .base import Evaluated, Forward

_FILE = "reference.safetensors"
TRAIN, EVAL = "train", "eval"


def dpo_loss(sums: torch.Tensor, reference: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the pairs' losses (scalar), and their margins (pairs,): by how much the chosen answer's reward is larger.

    ``sums`` and ``reference`` (2 x pairs,) are log-probabilities of chosen and rejected answers in turn, of the model
    that learns and of the one that it was.
    """
    rewards = beta * (sums - reference)
    margins = rewards[0::2] - rewards[1::2]
    return -logsigmoid(margins).sum(), margins


class Dpo:
    """Preference pairs."""

    together = 2
    generates = False

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self._reference: dict[str, torch.Tensor] = {}

    def check(self, data: Prepared) -> None:
        if not data.report.pairs:
            raise InputError(
                "train.objective: dpo learns from preference pairs, and the rows are none",
                hint="give rows with a prompt, chosen and rejected, or set train.objective to sft",
            )

    def begin(self, streamed: Streamed, data: Prepared, folder: Path, pad_id: int) -> None:
        path = folder / _FILE
        if path.exists():
            self._reference = load_file(path)
        elif streamed.steps == 0:
            self._reference = {
                name: reference_log_probabilities(streamed, rows, pad_id)
                for name, rows in ((TRAIN, data.train), (EVAL, data.eval))
            }
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            save_file(self._reference, temporary)
            temporary.replace(path)
        for name, rows in ((TRAIN, data.train), (EVAL, data.eval)):
            if name not in self._reference or len(self._reference[name]) != len(rows):
                raise CheckpointError(
                    f"{path} does not hold the start weights' log-probabilities of these rows",
                    hint=f"delete {folder} to start again",
                )

    def forward(self, streamed: Streamed, part: Batch, step: Batch) -> Forward:
        pairs = len(step.rows) // 2
        margins: list[torch.Tensor] = []
        loss = self._run(streamed, part, TRAIN, pairs, margins)
        return Forward(loss, {name: total / pairs for name, total in _figures(margins[0]).items()})

    def evaluate(self, streamed: Streamed, batch: Batch) -> Evaluated:
        margins: list[torch.Tensor] = []
        loss = self._run(streamed, batch, EVAL, 1, margins)
        return Evaluated(loss.item(), len(batch.rows) // 2, _figures(margins[0]))

    def _run(self, streamed: Streamed, batch: Batch, of: str, pairs: int, margins: list[torch.Tensor]) -> torch.Tensor:
        """The loss of a batch, divided by ``pairs``; its margins are appended."""
        reference = self._reference[of][list(batch.rows)]

        def row_loss(sums: torch.Tensor) -> torch.Tensor:
            loss, found = dpo_loss(sums, reference.to(sums.device), self.beta)
            margins.append(found.detach())
            return loss / pairs

        loss: torch.Tensor = streamed.model(**batch.inputs(), row_loss=row_loss).loss
        return loss


def reference_log_probabilities(streamed: Streamed, rows: Rows, pad_id: int) -> torch.Tensor:
    """Log-probability of each row's answer under the present weights, (rows,) float32 on the host."""
    found = torch.zeros(len(rows))
    by_length = sorted(range(len(rows)), key=lambda row: int(rows.lengths[row])) if len(rows) else []
    size = streamed.policy.micro_batch
    training = streamed.model.training
    streamed.model.eval()
    try:
        with torch.no_grad():
            for start in range(0, len(by_length), size):
                chosen = by_length[start : start + size]
                found[chosen] = _sums(streamed, collate(rows, chosen, pad_id))
    finally:
        streamed.model.train(training)
    return found


def _sums(streamed: Streamed, batch: Batch) -> torch.Tensor:
    kept: list[torch.Tensor] = []

    def row_loss(sums: torch.Tensor) -> torch.Tensor:
        kept.append(sums.detach().cpu())
        return sums.sum()

    streamed.model(**batch.inputs(), row_loss=row_loss)
    return kept[0]


def _figures(margins: torch.Tensor) -> dict[str, float]:
    """Totals over pairs: how often the chosen answer is preferred, and by how much."""
    return {
        "reward_accuracy": (margins > 0).sum().item(),
        "reward_margin": margins.sum().item(),
    }
