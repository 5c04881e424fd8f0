"""Word problems about two-digit sums, in the shape of MetaMathQA, drawn from a seed.

Held-out problems use number pairs that no training problem has, in either order, so that only a model that has learned
to add can solve them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

Pair = tuple[int, int]
Row = dict[str, str]

_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
_THINGS = ("apples", "books", "coins", "pens", "shells", "stamps")
_TEMPLATES = (
    "{name} has {a} {things} and finds {b} more. How many {things} now?",
    "{name} buys {a} {things} on Monday and {b} on Friday. How many in all?",
    "There are {a} {things} on the table and {b} under it. What is the total?",
    "{name} sold {a} {things} in May and {b} in June. How many in both months?",
    "One box holds {a} {things}, the other {b}. How many {things} in both boxes?",
    "{name} gave away {a} {things} and kept {b}. How many were there before?",
    "A shop gets {a} {things} today and {b} tomorrow. How many will it have?",
    "{name} counts {a} {things}, then another {b}. What is the sum?",
)
_HELD_OUT = 0.2
"""Share of the number pairs that training never sees."""


@dataclass(frozen=True)
class Problems:
    """Rows ``{"query", "response"}``; a response ends with "The answer is: N"."""

    train: list[Row]
    eval: list[Row]


def make_problems(*, train: int, eval: int, seed: int) -> Problems:
    """Draw ``train`` and ``eval`` problems; equal arguments give equal problems."""
    draw = random.Random(f"problems/{seed}")
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    draw.shuffle(pairs)
    held_out = round(_HELD_OUT * len(pairs))
    return Problems(_problems(draw, pairs[held_out:], train), _problems(draw, pairs[:held_out], eval))


def _problems(draw: random.Random, pairs: Sequence[Pair], count: int) -> list[Row]:
    return [_problem(draw, draw.choice(pairs)) for _ in range(count)]


def _problem(draw: random.Random, pair: Pair) -> Row:
    a, b = draw.sample(pair, 2)
    query = draw.choice(_TEMPLATES).format(name=draw.choice(_NAMES), things=draw.choice(_THINGS), a=a, b=b)
    return {"query": query, "response": _working(a, b)}


def _working(a: int, b: int) -> str:
    """Ones, then tens with the carry, as on paper."""
    ones, carry = a % 10 + b % 10, (a % 10 + b % 10) // 10
    tens = f"{a // 10}+{b // 10}" + ("+1" if carry else "")
    return f"{a % 10}+{b % 10}={ones}, {tens}={a // 10 + b // 10 + carry}. The answer is: {a + b}"
