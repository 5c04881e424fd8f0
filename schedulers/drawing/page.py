"""One HTML file for a plan or a simulation: no script, no network, light and dark by the reader's setting."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ...jobs.policy import Policy
from ...jobs.timeline import Timeline
from ...jobs.units import format_bytes
from .facts import policy_map, timeline_plot
from .svg import draw_map_legend, draw_policy_map, draw_timeline

STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5b6675;--paper:#fff;--line:#dde3ea;
--gpu:#2f6fbb;--host:#c77d1e;--nvme:#8a4fb0;--again:#b9c2cc;--m:#5fa56b;--a:#1f7a47;--frame:#d13b5c}
@media(prefers-color-scheme:dark){:root{--ink:#e7ebf0;--soft:#9aa6b4;--paper:#14181e;--line:#2c343e;
--gpu:#5b98e0;--host:#e0a04c;--nvme:#b585d6;--again:#4a5561;--m:#7cc088;--a:#3fa86c;--frame:#ff7292}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
body{max-width:1180px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0 0 .3rem}h2{font-size:1.05rem;margin:2rem 0 .6rem}p{color:var(--soft);margin:.2rem 0}
svg{width:100%;height:auto;display:block}.label{fill:var(--ink);font-size:12px}.small{fill:var(--soft);font-size:10px}
.tile{stroke:var(--line)}.letter{fill:#fff;font-size:11px;text-anchor:middle;pointer-events:none}
g:focus{outline:none}g:focus rect{stroke:var(--ink);stroke-width:2}
.k-gpu,.s-gpu{fill:var(--gpu);background:var(--gpu)}.k-host,.s-host{fill:var(--host);background:var(--host)}
.k-nvme,.s-nvme{fill:var(--nvme);background:var(--nvme)}.k-recompute,.s-recompute{fill:var(--again);background:var(--again)}
.k-none,.s-none{fill:transparent;background:transparent;border:1px solid var(--line)}
.k-matmuls-gpu,.s-matmuls-gpu{fill:var(--m);background:var(--m)}.k-all-gpu,.s-all-gpu{fill:var(--a);background:var(--a)}
.k-matmuls-host,.s-matmuls-host,.k-all-host,.s-all-host{fill:var(--host);background:var(--host)}
.resident{stroke:var(--frame);stroke-width:3}.frame{border:3px solid var(--frame)}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.4rem 1.2rem;color:var(--soft);font-size:13px}
.swatch{display:inline-block;min-width:1.5em;text-align:center;color:#fff;border-radius:4px;margin-right:.4em}
.s-none{color:var(--soft)}.lane{fill:var(--line);opacity:.35}.tick{stroke:var(--line)}.span{fill:var(--gpu)}.span:hover{opacity:.7}
.o-backward{fill:var(--a)}.o-recompute{fill:var(--frame)}.o-loss{fill:var(--ink)}.o-load{fill:var(--soft)}
.o-offload,.o-reload,.o-swap_out,.o-swap_in{fill:var(--host)}.o-gradient,.o-accumulate{fill:var(--m)}
.o-write,.o-read,.o-write_state,.o-read_state{fill:var(--nvme)}.o-update,.o-norm{fill:var(--nvme)}
table{border-collapse:collapse}td,th{padding:.25rem 1.2rem .25rem 0;text-align:left;border-bottom:1px solid var(--line)}
td{font-variant-numeric:tabular-nums}
"""


def page(title: str, policy: Policy, timeline: Timeline, figures: Mapping[str, str]) -> str:
    """The whole file: the title, ``figures`` as a table, the policy's map, the predicted timeline, the peaks."""
    rows = "".join(f"<tr><th scope=row>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in figures.items())
    peaks = ", ".join(f"{tier} {format_bytes(size)}" for tier, size in timeline.peak_bytes.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><table>{rows}</table>"
        f"<h2>Policy map</h2>{draw_policy_map(policy_map(policy))}{draw_map_legend()}"
        f"<h2>Predicted timeline of one step</h2>{draw_timeline(timeline_plot(timeline))}"
        f"<p>Peaks in this timeline: {escape(peaks)}. Point at a bar for its operation, times and bytes.</p>"
        "</body></html>\n"
    )
