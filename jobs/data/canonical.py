"""The one shape that every format becomes before anything else looks at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user"]


@dataclass(frozen=True, slots=True)
class Turn:
    """What stands before the answer: one message of someone else than the model."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that lead to one answer of the model; only the answer carries the loss."""

    prompt: tuple[Turn, ...]
    answer: str


class Refused(Exception):
    """A row that cannot be used, with the rule that it breaks. Never leaves this package."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self.rule = rule
