"""The demo's problems are right, and the held-out ones are new."""

from __future__ import annotations

import re

from lazytrain.jobs.evaluate import extract_answer
from lazytrain.platform.demo import make_problems

PROBLEMS = make_problems(train=2000, eval=500, seed=0)


def numbers(row: dict[str, str]) -> tuple[int, int]:
    a, b = map(int, re.findall(r"\d+", row["query"]))
    return a, b


def test_answers_are_right() -> None:
    for row in PROBLEMS.train + PROBLEMS.eval:
        assert row.keys() == {"query", "response"}
        assert extract_answer(row["response"]) == str(sum(numbers(row)))
        assert row["response"].endswith(f"The answer is: {sum(numbers(row))}")


def test_every_equation_of_the_working_is_true() -> None:
    for row in PROBLEMS.train:
        for left, right in re.findall(r"([\d+]+)=(\d+)", row["response"]):
            assert sum(map(int, left.split("+"))) == int(right)


def test_held_out_pairs_are_new_in_either_order() -> None:
    seen = {frozenset(numbers(row)) for row in PROBLEMS.train}
    assert seen.isdisjoint(frozenset(numbers(row)) for row in PROBLEMS.eval)


def test_two_digit_numbers_in_both_orders_with_and_without_carry() -> None:
    pairs = [numbers(row) for row in PROBLEMS.train]
    assert {len(str(number)) for pair in pairs for number in pair} == {2}
    assert 0.4 < sum(a < b for a, b in pairs) / len(pairs) < 0.6
    assert 0.3 < sum(a % 10 + b % 10 > 9 for a, b in pairs) / len(pairs) < 0.6


def test_wording_varies() -> None:
    assert len({re.sub(r"\d+", "N", row["query"]) for row in PROBLEMS.train}) > 100


def test_depend_on_the_seed_alone() -> None:
    assert make_problems(train=2000, eval=500, seed=0) == PROBLEMS
    assert make_problems(train=2000, eval=500, seed=1).train != PROBLEMS.train
