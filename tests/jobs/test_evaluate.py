"""Final answers are found, compared as values, and counted with an interval."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lazytrain.jobs.data import Rows
from lazytrain.jobs.evaluate import exact_match, extract_answer, same_answer, wilson_interval

MARKER = "The answer is:"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7+8=15. The answer is: 85", "85"),
        ("The answer is: 85.", "85"),
        ("The answer is: $\\frac{1}{2}$\nmore 7", "\\frac{1}{2}"),
        ("The answer is: 1. No. The answer is: 2", "2"),
        ("He has 48/2 = <<48/2=24>>24 clips\n#### 1,024", "1,024"),
        ("#### 3\nThe answer is: 4", "4"),
        ("so \\boxed{\\text{(A) } \\frac{3}{4}} of 9", "\\text{(A) } \\frac{3}{4}"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("first 3, then -4.5 apples.", "-4.5"),
        ("about 1,234,567 in 1,2", "2"),
        ("a \\boxed{ without end, 5", "5"),
        ("The answer is:", None),
        ("The answer is: \n\n 12 ", "12"),
        ("no idea", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text, MARKER) == answer


def test_extract_answer_after_another_marker() -> None:
    assert extract_answer("Antwort: 7 (nicht 8)", "Antwort:") == "7 (nicht 8)"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1,000", "1000.0", True),
        ("$1,000", "1000", True),
        ("\\$5", "5.00", True),
        ("0.5", "1/2", True),
        (".5", "0.50", True),
        ("-3", "−3", True),
        ("-$3", "-3", True),
        ("+3", "3.", True),
        ("0.1", "0.10000000000000000001", False),
        ("12", "21", False),
        ("1,2", "12", False),
        ("1/0", "1/0", True),
        ("1/0", "5", False),
        ("50%", "50", False),
        (" blue. ", "blue", True),
        ("Blue", "blue", False),
        ("1" * 10_000, "1" * 10_000, True),
        ("1e999999999", "2", False),
    ],
)
def test_same_answer(one: str, other: str, same: bool) -> None:
    assert same_answer(one, other) is same
    assert same_answer(other, one) is same


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (8, 10, 0.4902, 0.9433), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_interval(correct: int, total: int, low: float, high: float) -> None:
    """The last case is a published example (Newcombe 1998, table I)."""
    assert wilson_interval(correct, total) == pytest.approx((low, high), abs=5e-5)


def rows_of(*answers: str) -> Rows:
    rows = Rows()
    for i, answer in enumerate(answers):
        rows.append([0, 1], 1, f"prompt {i}", answer)
    return rows


def test_exact_match(tmp_path: Path) -> None:
    rows = rows_of("#### 1,000", "The answer is: 2", "a word", "The answer is: 4")
    outputs = {"prompt 0": "The answer is: 1000.0", "prompt 1": "it is 3", "prompt 2": " a word\n", "prompt 3": "none"}
    result = exact_match(lambda prompts: [outputs[prompt] for prompt in prompts], rows, marker=MARKER)
    assert [verdict.correct for verdict in result.verdicts] == [True, False, True, False]
    assert [verdict.predicted for verdict in result.verdicts] == ["1000.0", "3", "a word", None]
    assert (result.rate, result.correct, result.total) == (0.5, 2, 4)
    assert result.interval == wilson_interval(2, 4)
    result.save(tmp_path / "verdicts.jsonl")
    lines = (tmp_path / "verdicts.jsonl").read_bytes().split(b"\n")[:-1]
    assert json.loads(lines[0]) == {
        "prompt": "prompt 0",
        "output": "The answer is: 1000.0",
        "expected": "1,000",
        "predicted": "1000.0",
        "correct": True,
    }
    assert len(lines) == 4


def test_limit_is_spread_over_the_rows() -> None:
    seen: list[str] = []
    rows = rows_of(*map(str, range(10)))
    result = exact_match(lambda prompts: seen.extend(prompts) or ["0"] * len(prompts), rows, marker=MARKER, limit=4)
    assert seen == ["prompt 0", "prompt 2", "prompt 5", "prompt 7"]
    assert (result.correct, result.total) == (1, 4)


def test_no_rows() -> None:
    result = exact_match(lambda prompts: pytest.fail("nothing to predict"), Rows(), marker=MARKER)
    assert (result.rate, result.total, result.interval) == (0.0, 0, (0.0, 1.0))


def test_an_output_too_few_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        exact_match(lambda prompts: [], rows_of("1"), marker=MARKER)
