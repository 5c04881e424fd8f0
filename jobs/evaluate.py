"""Exact match: the share of rows whose generated final answer is the expected one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path

from .data import Rows

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+", re.ASCII)
_VALUE = re.compile(rf"({_NUMBER.pattern})(?:/(\d+))?", re.ASCII)
_MOST_DIGITS = 100
_NORMAL_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Verdict:
    """One row: what the model was given, what it wrote, and what was compared."""

    prompt: str
    output: str
    expected: str
    predicted: str | None
    """None when the output holds no answer."""
    correct: bool


@dataclass(frozen=True)
class ExactMatch:
    """``correct`` of ``total`` rows; ``interval`` holds the true rate with 95 % confidence (Wilson)."""

    rate: float
    correct: int
    total: int
    interval: tuple[float, float]
    verdicts: list[Verdict] = field(default_factory=list, repr=False)

    def save(self, path: str | Path) -> None:
        """Write the verdicts, one JSON object a line."""
        with Path(path).open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(asdict(verdict)) + "\n" for verdict in self.verdicts)


def exact_match(
    predict: Callable[[list[str]], list[str]], rows: Rows, *, marker: str, limit: int | None = None
) -> ExactMatch:
    """Compare what ``predict`` writes after each prompt with the row's answer.

    Final answers are compared; a row whose answer has none that `extract_answer` finds is compared as whole text.
    ``limit`` takes that many rows, spread evenly. Rows without a prompt (plain text) are left out.
    """
    prompted = [i for i, prompt in enumerate(rows.prompts) if prompt]
    chosen = [prompted[i] for i in _spread(len(prompted), limit)]
    prompts = [rows.prompts[i] for i in chosen]
    outputs = predict(prompts) if prompts else []
    verdicts = [
        _judge(prompt, output, rows.answers[i], marker)
        for prompt, output, i in zip(prompts, outputs, chosen, strict=True)
    ]
    correct, total = sum(verdict.correct for verdict in verdicts), len(verdicts)
    return ExactMatch(correct / total if total else 0.0, correct, total, wilson_interval(correct, total), verdicts)


def extract_answer(text: str, marker: str = "The answer is:") -> str | None:
    """The final answer in a text: after the last ``marker``, after ``####``, in ``\\boxed{}``, else the last number.

    After a marker the answer is the rest of the line. None if there is nothing of the kind.
    """
    for sign in (marker, "####"):
        _, found, rest = text.rpartition(sign)
        lines = rest.strip().splitlines()
        if found and lines:
            return _tidy(lines[0])
    boxed = _last_boxed(text)
    if boxed is not None:
        return _tidy(boxed)
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def same_answer(one: str, other: str) -> bool:
    """Equal as values when both are numbers (1,000 = 1000.0 = $1000; 1/2 = 0.5), else as stripped text."""
    one_value, other_value = _value(one), _value(other)
    if one_value is not None and other_value is not None:
        return one_value == other_value
    return _tidy(one) == _tidy(other)


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """95 % score interval of a share (Wilson, JASA 1927); (0, 1) for no rows."""
    if not total:
        return 0.0, 1.0
    rate, z2 = correct / total, _NORMAL_95**2
    centre = rate + z2 / (2 * total)
    spread = _NORMAL_95 * math.sqrt(rate * (1 - rate) / total + z2 / (4 * total**2))
    scale = 1 + z2 / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def _judge(prompt: str, output: str, answer: str, marker: str) -> Verdict:
    expected = extract_answer(answer, marker)
    if expected is None:
        predicted: str | None = output.strip()
        return Verdict(prompt, output, answer.strip(), predicted, predicted == answer.strip())
    predicted = extract_answer(output, marker)
    return Verdict(prompt, output, expected, predicted, predicted is not None and same_answer(predicted, expected))


def _spread(count: int, limit: int | None) -> Sequence[int]:
    if limit is None or limit >= count:
        return range(count)
    return [i * count // limit for i in range(limit)]


def _last_boxed(text: str) -> str | None:
    """Content of the last ``\\boxed{...}``, inner braces included."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for at, character in enumerate(rest if found else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:at]
    return None


def _tidy(text: str) -> str:
    """Without blanks, a closing full stop and the dollars around a formula."""
    text = text.strip()
    text = text.removesuffix(".").rstrip()
    if len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    return text


def _value(text: str) -> Fraction | None:
    """The number that a text is, if it is one."""
    text = _tidy(text).replace("−", "-").replace("\\$", "$")
    sign = "-" if text.startswith("-") else ""
    match = _VALUE.fullmatch(sign + text.removeprefix("-").removeprefix("$").strip())
    if match is None or len(text) > _MOST_DIGITS:
        return None
    below = int(match[2] or 1)
    return Fraction(match[1].replace(",", "")) / below if below else None
