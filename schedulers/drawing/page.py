"""HTML files that open without a server: style and script lie within, nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files

from ...jobs.policy import Policy
from ...jobs.timeline import Timeline
from ...jobs.units import format_bytes
from .draw_map import draw_policy_map
from .draw_timeline import draw_timelines
from .facts import policy_map, timeline_plot

STYLE = files(__package__).joinpath("plots.css").read_text(encoding="utf-8")
"""Style sheet of all plots; a page of a server gives it as a file of its own."""
SCRIPT = files(__package__).joinpath("plots.js").read_text(encoding="utf-8")
"""Script that zooms timelines; plots are complete without it."""
_FRAME = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;color:var(--plot-ink);background:var(--plot-paper)}
body{max-width:1180px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0 0 .3rem}h2{font-size:1.05rem;margin:2rem 0 .6rem}p{color:var(--plot-soft);margin:.2rem 0}
.figures{border-collapse:collapse;margin:0 0 1.5rem}
.figures td,.figures th{padding:.25rem 1.2rem .25rem 0;text-align:left;border-bottom:1px solid var(--plot-line)}
.figures td{font-variant-numeric:tabular-nums}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:0 2rem}
"""


def document(title: str, figures: Mapping[str, str], parts: Iterable[str]) -> str:
    """The whole file: the title, ``figures`` as a table, then ``parts``, which are HTML already."""
    rows = "".join(f"<tr><th scope=row>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in figures.items())
    table = f'<table class="figures">{rows}</table>' if rows else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}{_FRAME}</style></head><body><main>"
        f"<h1>{escape(title)}</h1>{table}{''.join(parts)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def page(title: str, policy: Policy, timeline: Timeline, figures: Mapping[str, str]) -> str:
    """The file of a plan: its figures, the policy's map, the predicted timeline, the peaks."""
    peaks = ", ".join(f"{tier} {format_bytes(size)}" for tier, size in timeline.peak_bytes.items())
    drawn = draw_timelines(timeline_plot(timeline), None, title="Predicted timeline of one step")
    return document(
        title, figures, (draw_policy_map(policy_map(policy)), drawn, f"<p>Peaks in this timeline: {escape(peaks)}.</p>")
    )


def grid(parts: Iterable[str]) -> str:
    """Plots side by side where there is room."""
    return f'<div class="grid">{"".join(parts)}</div>'
