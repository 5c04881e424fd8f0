"""A policy as rows of tiles: boundaries above the layers whose inputs they are.

Colour is never alone: every tile carries a letter, and its words are shown when it is pointed at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html import escape

from .elements import data_table, figure, svg, text
from .facts import HOME_WORDS, KEPT_WORDS, PolicyMap, Tile

TILE, GAP, PER_ROW, LEFT = 26, 3, 32, 112
LETTERS = {
    "gpu": "G", "host": "H", "nvme": "N", "recompute": "R",
    "none": "", "matmuls gpu": "m", "matmuls host": "m↓", "all gpu": "a", "all host": "a↓",
}  # fmt: skip


def draw_policy_map(facts: PolicyMap, *, title: str = "Policy map") -> str:
    """One tile per boundary and layer, in rows of 32, with the legend and the same as a table."""
    parts: list[str] = []
    y = 0
    for first in range(0, len(facts.boundaries), PER_ROW):
        for name, tiles in (("boundaries", facts.boundaries), ("layers", facts.layers)):
            row = tiles[first : first + PER_ROW]
            if row:
                parts.append(text(0, y + TILE * 0.68, f"{name} {first}…", "plot-label"))
                parts += [_tile(tile, k, y) for k, tile in enumerate(row)]
                y += TILE + GAP
        y += 3 * GAP
    columns = min(PER_ROW, max(len(facts.boundaries), 16))
    picture = svg(LEFT + columns * (TILE + GAP), y, _words(facts), parts, kind="plot-map")
    return figure(title, picture, legend=draw_map_legend(), table=_table(facts), wide=True)


def _tile(tile: Tile, column: int, y: int) -> str:
    x = LEFT + column * (TILE + GAP)
    kind = tile.kind.replace(" ", "-") + (" plot-resident" if tile.resident else "")
    return (
        f"<g><title>{escape(tile.words)}</title>"
        f'<rect x="{x}" y="{y}" width="{TILE}" height="{TILE}" rx="4" class="plot-tile k-{kind}"/>'
        + (
            text(x + TILE / 2, y + TILE * 0.68, LETTERS[tile.kind], "plot-letter", "middle")
            if tile.kind != "none"
            else ""
        )
        + "</g>"
    )


def draw_map_legend() -> str:
    """What the letters and colours of the map mean."""
    entries = [*HOME_WORDS.items(), *KEPT_WORDS.items()]
    items = (
        f'<li><span class="plot-key k-{kind.replace(" ", "-")}">{LETTERS[kind] or "·"}</span>{escape(words)}</li>'
        for kind, words in entries
    )
    resident = '<li><span class="plot-key plot-frame"></span>weights stay on the GPU</li>'
    return f'<ul class="plot-legend">{"".join(items)}{resident}</ul>'


def _words(facts: PolicyMap) -> str:
    """``Policy map. 9 boundaries: 5 on the GPU, ...``"""
    homes = Counter(HOME_WORDS[tile.kind] for tile in facts.boundaries)
    kept = Counter(KEPT_WORDS[tile.kind] for tile in facts.layers)
    resident = sum(tile.resident for tile in facts.layers)
    return (
        f"Policy map. {len(facts.boundaries)} boundaries: {_counted(homes)}. "
        f"{len(facts.layers)} layers: {_counted(kept)}; weights of {resident} stay on the GPU."
    )


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {words}" for words, count in counts.items())


def _table(facts: PolicyMap) -> str:
    """Equal neighbours share a row: people read ranges, not eighty lines."""
    rows = [*_ranges("boundary", facts.boundaries), *_ranges("layer", facts.layers)]
    return data_table(["what", "index", "decision"], rows)


def _ranges(what: str, tiles: Iterable[Tile]) -> list[list[str]]:
    rows: list[list[str]] = []
    for tile in tiles:
        decision = tile.words.partition(": ")[2]
        if rows and rows[-1][2] == decision:
            rows[-1][1] = f"{rows[-1][1].partition(' ')[0]} to {tile.index}"
        else:
            rows.append([what, str(tile.index), decision])
    return rows
