"""How the next token is chosen. A draw depends on seed, row and position alone: never on the batch a row is in.

Drawing from a distribution is taking the largest of its log-probabilities with Gumbel noise on top (Gumbel 1954), so
the model's greedy decoding does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessor

from ..errors import InputError


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 is greedy; ``top_p`` keeps the likeliest tokens that together have that probability."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise InputError(f"temperature is {self.temperature}; it must be from 0 (greedy) to 100")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it must be above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


GREEDY = Sampling(temperature=0.0)
_PRIME = 1_000_003


class Draw(LogitsProcessor):
    """Scores (rows, V) with noise, for rows with these numbers that have so many tokens of answer already."""

    def __init__(self, sampling: Sampling, rows: Sequence[int], written: Sequence[int], width: int) -> None:
        self._sampling, self._rows, self._written, self._width = sampling, list(rows), list(written), width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = nucleus(scores.float() / self._sampling.temperature, self._sampling.top_p)
        step = input_ids.shape[1] - self._width
        noise = torch.stack(
            [
                _gumbel(self._sampling.seed, row, written + step, scores.shape[1])
                for row, written in zip(self._rows, self._written, strict=True)
            ]
        )
        return kept + noise.to(scores.device)


def nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Scores with -inf for tokens outside the smallest set that has probability ``top_p`` (Holtzman et al. 2020)."""
    if top_p == 1:
        return scores
    ordered, places = scores.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, places, before >= top_p)
    return scores.masked_fill(outside, float("-inf"))


def _gumbel(seed: int, row: int, position: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(((seed * _PRIME + row) * _PRIME + position) % 2**63)
    uniform = torch.rand(size, generator=generator, dtype=torch.float64).clamp_(min=1e-300)
    noise: torch.Tensor = -torch.log(-torch.log(uniform)).float()
    return noise
