"""How much of a machine is in use: facts and bars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .elements import data_table, figure, rect, svg, text

WIDTH, ROW, BAR, LEFT, RIGHT = 520, 34, 16, 140, 140


@dataclass(frozen=True, slots=True)
class UsageBar:
    """One resource; ``used`` and ``total`` in the same unit, ``words`` say them for people."""

    label: str
    used: float
    total: float
    words: str


def draw_usage(title: str, bars: Iterable[UsageBar]) -> str:
    """One bar a resource; without bars, a sentence."""
    found = list(bars)
    if not found:
        return figure(title, '<p class="plot-empty">Nothing has been measured yet.</p>')
    parts: list[str] = []
    for k, bar in enumerate(found):
        y = k * ROW + (ROW - BAR) / 2
        parts.append(text(LEFT - 8, y + 13, _short(bar.label), "plot-label", "end"))
        parts.append(rect(LEFT, y, WIDTH - LEFT - RIGHT, BAR, "plot-lane"))
        width = (WIDTH - LEFT - RIGHT) * _share(bar.used, bar.total)
        if width:
            parts.append(rect(LEFT, y, width, BAR, f"plot-used {'plot-full' if bar.used >= bar.total else ''}"))
        parts.append(text(WIDTH - RIGHT + 8, y + 13, bar.words, "plot-tick"))
    words = ", ".join(f"{bar.label} {bar.words}" for bar in found)
    table = data_table(["resource", "use"], [[bar.label, bar.words] for bar in found])
    return figure(title, svg(WIDTH, len(found) * ROW, f"{title}: {words}", parts, kind="plot-usage"), table=table)


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def _short(words: str) -> str:
    return words if len(words) <= 18 else f"{words[:17]}…"
