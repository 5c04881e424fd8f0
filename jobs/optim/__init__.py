"""AdamW on the host: 8-bit states, a split master whose high halves are the streamed weights, exact global clipping."""

from __future__ import annotations

from .clipping import Clip, clip, squares
from .codes import MOMENTUM, ROOT_VARIANCE, FloatCode
from .hybrid import HybridAdamW
from .split import join, split
from .unit import UnitOptimizer

__all__ = [
    "MOMENTUM",
    "ROOT_VARIANCE",
    "Clip",
    "FloatCode",
    "HybridAdamW",
    "UnitOptimizer",
    "clip",
    "join",
    "split",
    "squares",
]
