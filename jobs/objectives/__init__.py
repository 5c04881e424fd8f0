"""What a run learns, behind one protocol: `Sft` the answers of its rows, `Dpo` to prefer one answer to another."""

from __future__ import annotations

from ..spec import Train
from .base import Evaluated, Forward, Objective
from .dpo import Dpo, dpo_loss
from .sft import Sft

__all__ = ["Dpo", "Evaluated", "Forward", "Objective", "Sft", "dpo_loss", "objective_of"]


def objective_of(section: Train) -> Objective:
    """The objective that the job asks for."""
    return Dpo(section.dpo.beta) if section.objective == "dpo" else Sft()
