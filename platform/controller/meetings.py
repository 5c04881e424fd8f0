"""What planning was asked about nodes that jobs are about to share, and what it answered; a restart asks again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ...jobs.errors import LazytrainError
from ..admission import Answer, Found

PREFIX: Final = "together-"
"""How the names of these questions begin: no job's does."""


@dataclass
class Meetings:
    """Notes of one controller."""

    asked: dict[str, str] = field(default_factory=dict)
    """By node, the name of the question about the jobs that are to start there."""
    answers: dict[str, Answer | LazytrainError] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    """Since when each job that could start now waits for its plan."""

    def take(self, found: dict[str, Found]) -> None:
        """Keep the answers that somebody waits for."""
        for name, answer in found.items():
            if name in self.asked.values() and isinstance(answer, Answer | LazytrainError):
                self.answers[name] = answer
