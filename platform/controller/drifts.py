"""What planning was asked about runs that measured another machine, or have other neighbours, than planned."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from ...jobs.errors import LazytrainError
from ..admission import Answer, Found

PREFIX: Final = "drift-"
"""How the names of these questions begin: no job's does."""
CALIBRATED: Final = "calibrated"
"""Reason of a job when it is first known how far off its prediction was; it soon goes back to running."""


@dataclass
class Drifts:
    """Notes of one controller."""

    seen: dict[str, float] = field(default_factory=dict)
    """By claim, when the steps were recorded that were asked about last."""
    asked: set[str] = field(default_factory=set)
    """Claims about which planning has not answered yet: one question at a time for each."""
    answers: dict[str, Answer | LazytrainError] = field(default_factory=dict)
    company: dict[str, frozenset[str]] = field(default_factory=dict)
    """By claim, the jobs beside which it was planned last."""

    def take(self, found: dict[str, Found]) -> None:
        """Keep the answers that somebody waits for."""
        for name, answer in found.items():
            claim = name.removeprefix(PREFIX)
            if name != claim and claim in self.asked and isinstance(answer, Answer | LazytrainError):
                self.answers[claim] = answer

    def keep_only(self, claims: Collection[str]) -> None:
        """Forget all other claims."""
        self.seen = {claim: at for claim, at in self.seen.items() if claim in claims}
        self.answers = {claim: answer for claim, answer in self.answers.items() if claim in claims}
        self.company = {claim: jobs for claim, jobs in self.company.items() if claim in claims}
        self.asked &= set(claims)
