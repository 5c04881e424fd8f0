"""Facts of a plot of metrics over steps: one line a run, thinned so that no peak and no gap is lost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_POINTS = 400
MOST_LINES = 8


@dataclass(frozen=True, slots=True)
class Line:
    """One run's values of one metric; None where a value was not finite, which is a gap."""

    label: str
    steps: tuple[float, ...]
    values: tuple[float | None, ...]
    count: int
    """How many values there were before thinning."""
    bad: tuple[tuple[float, str], ...] = ()
    """Steps whose value is no finite number, with what it is in words."""

    @property
    def finite(self) -> list[float]:
        """The values that are there."""
        return [value for value in self.values if value is not None]

    @property
    def last(self) -> float | None:
        """The last finite value."""
        return next((value for value in reversed(self.values) if value is not None), None)


@dataclass(frozen=True, slots=True)
class SeriesPlot:
    """One metric of one or more runs over the steps."""

    title: str
    lines: tuple[Line, ...]
    unit: str = ""
    log: bool = False
    """Whether the vertical axis is logarithmic; it is only where all values are positive."""
    left_out: int = 0
    """Runs beyond `MOST_LINES`."""


def line(
    label: str, steps: Sequence[float], values: Sequence[float | None], *, most: int = MOST_POINTS, count: int = 0
) -> Line:
    """A line of at most about ``most`` points; of each stretch that is left out, lowest and highest value stay.

    ``count`` says how many points there were, if some were left out before.
    """
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    bad = [(step, _words(value)) for step, value, kept in zip(steps, values, finite, strict=True) if kept is None]
    chosen = thin(finite, most)
    return Line(
        label,
        tuple(steps[k] for k in chosen),
        tuple(finite[k] for k in chosen),
        count or len(finite),
        tuple(bad[:: max(1, len(bad) // 40)]),
    )


def series_plot(title: str, lines: Iterable[Line], *, unit: str = "", log: bool = False) -> SeriesPlot:
    """The facts of one plot; lines without a value are left out."""
    found = [each for each in lines if each.steps]
    return SeriesPlot(title, tuple(found[:MOST_LINES]), unit, log, max(0, len(found) - MOST_LINES))


def thin(values: Sequence[float | None], most: int) -> list[int]:
    """Indices of the points to keep, in order: first and last, and of each stretch the lowest, highest and a gap."""
    if len(values) <= most:
        return list(range(len(values)))
    stretches = max(1, most // 2)
    kept = {0, len(values) - 1}
    for k in range(stretches):
        begin, end = k * len(values) // stretches, (k + 1) * len(values) // stretches
        found = [(value, i) for i in range(begin, end) if (value := values[i]) is not None]
        if found:
            kept |= {min(found)[1], max(found)[1]}
        if len(found) < end - begin:
            kept.add(next(i for i in range(begin, end) if values[i] is None))
    return sorted(kept)


def _words(value: float | None) -> str:
    if value is None:
        return "not a finite number"
    return "not a number" if math.isnan(value) else "infinite"
