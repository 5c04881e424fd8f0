"""Lines over steps as SVG. Runs differ in colour and in dashes; values that are no numbers are crosses at the top."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from .elements import data_table, figure, number, rect, rule, svg, text, ticks
from .series import Line, SeriesPlot

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 12, 34
_COLUMNS = 100
_TABLE_ROWS = 12


@dataclass(frozen=True)
class _Scale:
    """From step and value to the picture."""

    first: float
    last: float
    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, facts: SeriesPlot) -> _Scale:
        steps = [step for line in facts.lines for step in line.steps] or [0.0]
        values = [value for line in facts.lines for value in line.finite]
        log = facts.log and bool(values) and min(values) > 0
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if log:
            low, high = math.log10(low), math.log10(high)
        room = (high - low) * 0.06 or max(abs(high) * 0.1, 1e-12)
        bottom = low - room
        if not log and low >= 0 > bottom:
            bottom = 0.0
        first, last = min(steps), max(steps)
        if first == last:
            first, last = first - 0.5, last + 0.5
        return cls(first, last, bottom, high + room, log)

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        share = (at - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def value_ticks(self) -> list[float]:
        if not self.log:
            return ticks(self.low, self.high)
        powers = [10.0**k for k in range(math.ceil(self.low), math.floor(self.high) + 1)]
        if len(powers) >= 2:
            return powers[:: max(1, len(powers) // 5)]
        return [tick for tick in ticks(10**self.low, 10**self.high) if tick > 0]


def draw_series(facts: SeriesPlot) -> str:
    """The plot with its legend and the same figures as a table."""
    title = f"{facts.title} ({facts.unit})" if facts.unit else facts.title
    if not facts.lines:
        return figure(title, '<p class="plot-empty">Nothing has been reported yet.</p>')
    scale = _Scale.of(facts)
    parts = [*_axes(scale)]
    for index, each in enumerate(facts.lines):
        parts += _line(each, index, scale)
        parts += _bad(each, index, scale)
    parts.append(f'<g aria-hidden="true">{"".join(_columns(facts, scale))}</g>')
    picture = svg(WIDTH, HEIGHT, _words(facts), parts, kind="plot-series")
    note = f"{facts.left_out} more runs are not drawn." if facts.left_out else ""
    return figure(title, picture, legend=_legend(facts), note=note, table=_table(facts))


def _axes(scale: _Scale) -> Iterator[str]:
    for value in scale.value_ticks():
        y = scale.y(value)
        yield rule(LEFT, y, WIDTH - RIGHT, y)
        yield text(LEFT - 6, y + 4, number(value), "plot-tick", "end")
    marks = ticks(scale.first, scale.last, 6)
    for step in [mark for mark in marks if mark == int(mark)] or [(scale.first + scale.last) / 2]:
        x = scale.x(step)
        anchor = "end" if x > WIDTH - RIGHT - 14 else "middle"
        yield text(x, HEIGHT - BOTTOM + 16, number(step), "plot-tick", anchor)
    yield rule(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "plot-axis")
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, "step", "plot-tick", "middle")


def _line(line: Line, index: int, scale: _Scale) -> Iterator[str]:
    """A path with a move at every gap; a value between two gaps is a dot."""
    path: list[str] = []
    values = (None, *line.values, None)
    for k, (step, value) in enumerate(zip(line.steps, line.values, strict=True), start=1):
        if value is None:
            continue
        x, y = scale.x(step), scale.y(value)
        if values[k - 1] is None and values[k + 1] is None:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.5" class="plot-dot c-{index}"/>'
        else:
            path.append(f"{'M' if values[k - 1] is None else 'L'}{x:.1f} {y:.1f}")
    if path:
        yield f'<path d="{"".join(path)}" class="plot-line c-{index}"/>'


def _bad(line: Line, index: int, scale: _Scale) -> Iterator[str]:
    for step, words in line.bad:
        x, y = scale.x(step), TOP - 2
        yield (
            f'<path d="M{x - 4:.1f} {y - 4}l8 8m0-8l-8 8" class="plot-bad">'
            f"<title>{escape(line.label)}, step {number(step)}: {words}</title></path>"
        )


def _columns(facts: SeriesPlot, scale: _Scale) -> Iterator[str]:
    """Columns that show the values at a step when they are pointed at."""
    steps = sorted({step for line in facts.lines for step in line.steps})
    shown = steps[:: max(1, len(steps) // _COLUMNS)]
    edges = [LEFT, *((scale.x(a) + scale.x(b)) / 2 for a, b in pairwise(shown)), WIDTH - RIGHT]
    for step, begin, end in zip(shown, edges[:-1], edges[1:], strict=True):
        values = ", ".join(f"{line.label} {number(_at(line, step))}" for line in facts.lines)
        yield rect(begin, TOP, end - begin, HEIGHT - TOP - BOTTOM, "plot-hit", f"step {number(step)}: {values}")


def _at(line: Line, step: float) -> float | None:
    """The value at the step, or at the last one before it."""
    k = bisect_left(line.steps, step)
    if k == len(line.steps) or line.steps[k] != step:
        k -= 1
    return line.values[k] if k >= 0 else None


def _legend(facts: SeriesPlot) -> str:
    items = "".join(
        '<li><svg class="plot-swatch" viewBox="0 0 24 8" aria-hidden="true">'
        f'<path d="M0 4H24" class="plot-line c-{k}"/></svg>'
        f"{escape(line.label)} <b>{number(line.last)}</b>{_bad_words(line)}</li>"
        for k, line in enumerate(facts.lines)
    )
    return f'<ul class="plot-legend">{items}</ul>'


def _bad_words(line: Line) -> str:
    return ' <span class="plot-bad-words">has values that are no finite numbers</span>' if line.bad else ""


def _words(facts: SeriesPlot) -> str:
    told = []
    for line in facts.lines:
        values = line.finite
        if values:
            span = f"between {number(min(values))} and {number(max(values))}, last {number(line.last)}"
        else:
            span = "without a finite value"
        told.append(f"{line.label}: {line.count} values {span}")
    return f"{facts.title} over steps. {'. '.join(told)}."


def _table(facts: SeriesPlot) -> str:
    steps = sorted({step for line in facts.lines for step in line.steps})
    shown = steps[:: max(1, math.ceil(len(steps) / _TABLE_ROWS))]
    if steps and shown[-1] != steps[-1]:
        shown.append(steps[-1])
    rows = [[number(step), *(number(_at(line, step)) for line in facts.lines)] for step in shown]
    return data_table(["step", *(line.label for line in facts.lines)], rows)
