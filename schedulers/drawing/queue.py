"""When the jobs of the queue are expected to run: facts and bars over time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .elements import data_table, figure, rect, rule, seconds, svg, text, ticks

WIDTH, ROW, BAR, LEFT, RIGHT, BOTTOM = 900, 26, 16, 200, 24, 24
MOST_ROWS = 40
_DISTANCES = (1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800, 604_800)


@dataclass(frozen=True, slots=True)
class QueueBar:
    """A job; times are seconds from now, before now negative."""

    label: str
    start_s: float
    end_s: float
    running: bool
    where: str = ""
    """Node that it runs on or is expected on."""


@dataclass(frozen=True, slots=True)
class QueuePlot:
    """Running jobs, then those that wait, by expected start."""

    bars: tuple[QueueBar, ...]
    unknown: int = 0
    """Jobs of which nobody can say when they start."""
    left_out: int = 0
    """Jobs beyond `MOST_ROWS`."""


def queue_plot(bars: Iterable[QueueBar], unknown: int = 0) -> QueuePlot:
    """The facts of the plot: who runs first, then by expected start."""
    found = sorted(bars, key=lambda bar: (not bar.running, bar.start_s, bar.label))
    return QueuePlot(tuple(found[:MOST_ROWS]), unknown, max(0, len(found) - MOST_ROWS))


def draw_queue(facts: QueuePlot, *, title: str = "Expected start and end") -> str:
    """One bar a job, from its start to its end; the time before now is cut off."""
    if not facts.bars:
        return figure(title, '<p class="plot-empty">No job has an expected time.</p>', note=_note(facts))
    last = max(max(bar.end_s for bar in facts.bars), 1.0)
    first = max(min(0.0, *(bar.start_s for bar in facts.bars)), -0.25 * last)
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    height = len(facts.bars) * ROW
    parts: list[str] = []
    for mark in _marks(first, last):
        x = LEFT + (mark - first) * scale
        parts.append(rule(x, 0, x, height, "plot-grid" if mark else "plot-now"))
        parts.append(text(x, height + 16, "now" if not mark else seconds(mark), "plot-tick", "middle"))
    for k, bar in enumerate(facts.bars):
        y = k * ROW + (ROW - BAR) / 2
        start_s = max(bar.start_s, first)
        parts.append(text(LEFT - 8, y + 12, _short(bar.label), "plot-label", "end"))
        kind = "plot-running" if bar.running else "plot-waiting"
        x, width = LEFT + (start_s - first) * scale, max(2.0, (bar.end_s - start_s) * scale)
        parts.append(rect(x, y, width, BAR, kind, f"{bar.label}: {_words(bar)}"))
    running = sum(bar.running for bar in facts.bars)
    words = f"{title}: {running} running, {len(facts.bars) - running} waiting, the last ends in {seconds(last)}"
    table = data_table(["job", "when", "where"], [[bar.label, _words(bar), bar.where] for bar in facts.bars])
    picture = svg(WIDTH, height + BOTTOM, words, parts, kind="plot-queue")
    return figure(title, picture, legend=_legend(), note=_note(facts), table=table, wide=True)


def _marks(first: float, last: float) -> list[float]:
    distance = next((d for d in _DISTANCES if (last - first) / d <= 8), None)
    if distance is None:
        return ticks(first, last, 8)
    return [k * float(distance) for k in range(int(first // distance) + 1, int(last // distance) + 1)] or [0.0]


def _words(bar: QueueBar) -> str:
    if bar.running:
        return f"runs, ends in {seconds(max(0.0, bar.end_s))}"
    return f"starts in {seconds(max(0.0, bar.start_s))}, ends in {seconds(max(0.0, bar.end_s))}"


def _note(facts: QueuePlot) -> str:
    words = f"{facts.unknown} more wait for something that has no time yet." if facts.unknown else ""
    return f"{words} {facts.left_out} later ones are not drawn.".strip() if facts.left_out else words


def _legend() -> str:
    return (
        '<ul class="plot-legend"><li><span class="plot-key plot-running"></span>runs</li>'
        '<li><span class="plot-key plot-waiting"></span>waits until then</li></ul>'
    )


def _short(words: str) -> str:
    return words if len(words) <= 24 else f"{words[:23]}…"
