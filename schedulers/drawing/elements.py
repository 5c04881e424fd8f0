"""The small parts of which all plots are made: numbers as words, round ticks, escaped SVG elements."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) within [low, high], about ``most`` of them."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(power * k for k in (1, 2, 5, 10) if power * k >= rough * 0.999)
    first = math.ceil(low / distance - 1e-9)
    return [k * distance for k in range(first, math.floor(high / distance + 1e-9) + 1)]


def number(value: float | None) -> str:
    """``12345`` becomes ``12.3k``, ``0.0000123`` becomes ``1.23e-05``; ``none`` without a value."""
    if value is None or math.isnan(value):
        return "none"
    if math.isinf(value):
        return "infinite"
    for size, letter in _PREFIXES:
        if size <= abs(value) < size * 1000 and abs(value) >= 10_000:
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def seconds(value: float) -> str:
    """``0.0123`` becomes ``12.3 ms``, ``5400`` becomes ``1.5 h``."""
    for size, unit in ((172_800.0, "d"), (5400.0, "h"), (180.0, "min")):
        if abs(value) >= size:
            return f"{value / {'d': 86_400.0, 'h': 3600.0, 'min': 60.0}[unit]:.3g} {unit}"
    return f"{value * 1e3:.3g} ms" if abs(value) < 1 and value else f"{value:.4g} s"


def svg(width: float, height: float, words: str, parts: Iterable[str], *, kind: str = "") -> str:
    """An image that a screen reader says as ``words``."""
    return (
        f'<svg class="plot {kind}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(words)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words in a picture; (x, y) is their base line's start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="plot-text {kind}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, words: str = "", *, digits: int = 2) -> str:
    """A rectangle; ``words`` are shown when it is pointed at."""
    inner = f"><title>{escape(words)}</title></rect>" if words else "/>"
    return (
        f'<rect x="{x:.{digits}f}" y="{y:.2f}" width="{width:.{digits}f}" height="{height:.2f}" '
        f'class="{escape(kind)}"{inner}'
    )


def rule(x1: float, y1: float, x2: float, y2: float, kind: str = "plot-grid") -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def figure(title: str, body: str, *, legend: str = "", note: str = "", table: str = "", wide: bool = False) -> str:
    """A picture with its caption; what is ``wide`` scrolls on a small screen."""
    if wide:
        label = escape(title)
        body = f'<div class="plot-scroll" tabindex="0" role="region" aria-label="{label}">{body}</div>'
    said = f'<p class="plot-note">{escape(note)}</p>' if note else ""
    return f'<figure class="plot-figure"><figcaption>{escape(title)}</figcaption>{body}{legend}{said}{table}</figure>'


def data_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """The same facts for those who cannot see the picture, folded away."""
    first = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        '<details class="plot-data"><summary>As a table</summary>'
        f"<table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></details>"
    )
