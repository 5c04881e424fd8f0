"""Plots as SVG text. Colours are classes of `page`'s style sheet, which has one set for light and one for dark.

Colour is never alone: every tile and span has its words as a title, which a pointer shows and a screen reader says, and
tiles carry a letter.
"""

from __future__ import annotations

from html import escape

from ...jobs.units import format_bytes
from .facts import HOME_WORDS, KEPT_WORDS, PolicyMap, Tile, TimelinePlot

TILE, GAP, PER_ROW, LEFT = 26, 3, 32, 96
LETTERS = {
    "gpu": "G", "host": "H", "nvme": "N", "recompute": "R",
    "none": "", "matmuls gpu": "m", "matmuls host": "m↓", "all gpu": "a", "all host": "a↓",
}  # fmt: skip
LANE_HEIGHT, LANE_GAP, WIDTH = 26, 10, 1100
TICKS = 8


def draw_policy_map(facts: PolicyMap) -> str:
    """One tile per boundary and layer, in rows of 32."""
    parts: list[str] = []
    y = 0
    for first in range(0, len(facts.boundaries), PER_ROW):
        for name, tiles in (("boundaries", facts.boundaries), ("layers", facts.layers)):
            row = tiles[first : first + PER_ROW]
            if row:
                parts.append(f'<text x="0" y="{y + TILE * 0.68:.0f}" class="label">{name} {first}…</text>')
                parts += [_tile(tile, k, y) for k, tile in enumerate(row)]
                y += TILE + GAP
        y += 3 * GAP
    width = LEFT + PER_ROW * (TILE + GAP)
    return _svg(width, y, "Policy map: where each boundary waits and what each layer keeps", parts)


def _tile(tile: Tile, column: int, y: int) -> str:
    x = LEFT + column * (TILE + GAP)
    kind = tile.kind.replace(" ", "-") + (" resident" if tile.resident else "")
    return (
        f'<g tabindex="0" role="img" aria-label="{escape(tile.words)}"><title>{escape(tile.words)}</title>'
        f'<rect x="{x}" y="{y}" width="{TILE}" height="{TILE}" rx="4" class="tile k-{kind}"/>'
        f'<text x="{x + TILE / 2:.0f}" y="{y + TILE * 0.68:.0f}" class="letter">{LETTERS[tile.kind]}</text></g>'
    )


def draw_map_legend() -> str:
    """What the letters and colours of the map mean."""
    entries = [*HOME_WORDS.items(), *KEPT_WORDS.items()]
    items = (
        f'<li><span class="swatch s-{kind.replace(" ", "-")}">{LETTERS[kind] or "·"}</span>{escape(words)}</li>'
        for kind, words in entries
    )
    return f'<ul class="legend">{"".join(items)}<li><span class="swatch frame"></span>weights stay on the GPU</li></ul>'


def draw_timeline(facts: TimelinePlot) -> str:
    """One lane per stream; time runs to the right."""
    height = len(facts.lanes) * (LANE_HEIGHT + LANE_GAP) + 24
    scale = (WIDTH - LEFT) / facts.step_s if facts.step_s else 0.0
    parts = _ticks(facts.step_s, scale, height - 24)
    for k, lane in enumerate(facts.lanes):
        y = k * (LANE_HEIGHT + LANE_GAP)
        parts.append(f'<text x="0" y="{y + 12}" class="label">{escape(lane.words)}</text>')
        parts.append(f'<text x="0" y="{y + 24}" class="label small">{lane.busy_share:.0%} busy</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT}" height="{LANE_HEIGHT}" class="lane"/>')
        for span in lane.spans:
            words = f"{span.op}: {_seconds(span.start_s)} to {_seconds(span.end_s)}"
            words += f", {format_bytes(span.bytes)}" if span.bytes else ""
            x, width = LEFT + span.start_s * scale, max(0.4, (span.end_s - span.start_s) * scale)
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{LANE_HEIGHT}" '
                f'class="span o-{escape(span.kind)}">'
                f"<title>{escape(words)}</title></rect>"
            )
    return _svg(WIDTH, height, f"Predicted timeline of one step of {_seconds(facts.step_s)}", parts)


def _ticks(step_s: float, scale: float, height: int) -> list[str]:
    parts = []
    for k in range(TICKS + 1):
        second = step_s * k / TICKS
        x = LEFT + second * scale
        anchor = "start" if not k else "end" if k == TICKS else "middle"
        parts.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height}" class="tick"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{height + 16}" text-anchor="{anchor}" class="label small">{_seconds(second)}</text>'
        )
    return parts


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.4g} s"


def _svg(width: float, height: float, title: str, parts: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="group" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )
