"""Clipping by the true global norm, which is summed while gradients leave the device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_CHUNK = 1 << 18


class Clip(NamedTuple):
    """What to do with a step's gradients, and what to log.

    ``norm`` is the global norm before clipping; ``scale`` the factor for every gradient; ``finite`` is False when some
    gradient is infinite or not a number: then ``scale`` is 0 and the step must be skipped, not multiplied by it.
    """

    norm: float
    scale: float
    finite: bool


def squares(gradient: torch.Tensor) -> float:
    """Sum of squares of a gradient of any float dtype and shape, accumulated in fp64 so that it cannot overflow."""
    total = 0.0
    flat = gradient.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        wide = flat[start : start + _CHUNK].to(torch.float64)
        total += float(torch.dot(wide, wide))
    return total


def clip(sum_of_squares: float, max_norm: float | None) -> Clip:
    """The factor of ``torch.nn.utils.clip_grad_norm_``: min(1, max_norm / (norm + 1e-6)); 1 without a ``max_norm``."""
    if not math.isfinite(sum_of_squares):
        return Clip(math.sqrt(sum_of_squares) if sum_of_squares > 0 else math.nan, 0.0, False)
    norm = math.sqrt(sum_of_squares)
    return Clip(norm, 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6)), True)
