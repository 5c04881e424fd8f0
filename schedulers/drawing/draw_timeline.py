"""One step as lanes, one a stream: the prediction above what was measured, exposed time in red.

Every lane is an image of its own in which x is the share of the drawn time in thousandths, so that ``plots.js`` zooms
by setting its ``viewBox``; without the script the whole step is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ...jobs.timeline import STREAMS
from ...jobs.units import format_bytes
from .elements import data_table, figure, rect, rule, seconds, svg, text
from .facts import LANE_WORDS, Lane, TimelinePlot

LEFT, WIDTH, RIGHT = 150, 1100, 36
LANE_HEIGHT, LANE_GAP, EXPOSED_HEIGHT = 22, 12, 5
UNITS = 1000
"""Width of a lane in its own units: the whole drawn time."""
TICKS = 8
KINDS = {
    "forward": "forward", "backward": "backward", "forward again": "recompute", "loss": "loss",
    "weights": "load", "boundaries and internals": "offload reload swap_out swap_in",
    "gradients": "gradient accumulate norm", "NVMe": "write read spill fetch write_state read_state "
    "write_gradient read_gradient",
    "update": "update clip",
}  # fmt: skip


def draw_timelines(predicted: TimelinePlot | None, measured: TimelinePlot | None, *, title: str = "One step") -> str:
    """The lanes of both, or of the one that there is, over the same time."""
    plots = [(name, plot) for name, plot in (("predicted", predicted), ("measured", measured)) if plot is not None]
    if not plots:
        return figure(title, '<p class="plot-empty">There is no timeline yet.</p>')
    drawn_s = max(plot.step_s for _, plot in plots) or 1.0
    rows = [(stream, name, plot) for stream in STREAMS for name, plot in plots if _lane(plot, stream)]
    height = sum(_row_height(stream) for stream, _, _ in rows)
    parts, y = [*_ticks(drawn_s, height)], 0.0
    for k, (stream, name, plot) in enumerate(rows):
        first = not k or rows[k - 1][0] != stream
        parts += _row(stream, name if len(plots) > 1 else "", plot, y, drawn_s, first=first)
        y += _row_height(stream)
    words = ". ".join(_words(name, plot) for name, plot in plots)
    picture = svg(WIDTH, height + 24, f"{title}. {words}", parts, kind="plot-timeline")
    body = f'{_tools()}<div class="plot-zoom" data-seconds="{drawn_s!r}">{picture}</div>'
    return figure(title, body, legend=_legend(), note=f"{words}.", table=_table(plots), wide=True)


def _lane(plot: TimelinePlot, stream: str) -> Lane | None:
    return next((lane for lane in plot.lanes if lane.stream == stream), None)


def _row_height(stream: str) -> float:
    return LANE_HEIGHT + LANE_GAP + (EXPOSED_HEIGHT if stream == "compute" else 0)


def _row(stream: str, name: str, plot: TimelinePlot, y: float, drawn_s: float, *, first: bool) -> Iterator[str]:
    lane = _lane(plot, stream)
    assert lane is not None
    if first:
        yield text(0, y + 11, LANE_WORDS[stream], "plot-label")
    busy = f"{lane.busy_share:.0%} busy"
    yield text(0, y + 23, f"{name} {busy}" if name else busy, "plot-tick")
    height = _row_height(stream) - LANE_GAP
    yield rect(LEFT, y, WIDTH - LEFT - RIGHT, LANE_HEIGHT, "plot-lane")
    yield (
        f'<svg x="{LEFT}" y="{y:.0f}" width="{WIDTH - LEFT - RIGHT}" height="{height}" class="plot-track" '
        f'viewBox="0 0 {UNITS} {height}" preserveAspectRatio="none">'
    )
    yield from _spans(lane, drawn_s)
    if stream == "compute":
        yield from _exposed(plot, drawn_s)
    yield "</svg>"


def _spans(lane: Lane, drawn_s: float) -> Iterator[str]:
    scale = UNITS / drawn_s
    for span in lane.spans:
        words = f"{span.op}: {seconds(span.start_s)} to {seconds(span.end_s)}"
        words += f", {format_bytes(span.bytes)}" if span.bytes else ""
        width = (span.end_s - span.start_s) * scale
        yield rect(span.start_s * scale, 0, width, LANE_HEIGHT, f"plot-span o-{span.kind}", words, digits=4)


def _exposed(plot: TimelinePlot, drawn_s: float) -> Iterator[str]:
    scale = UNITS / drawn_s
    for span in plot.exposed:
        words = f"compute waits for {LANE_WORDS[span.stream]}: {seconds(span.end_s - span.start_s)}"
        x, width = span.start_s * scale, (span.end_s - span.start_s) * scale
        yield rect(x, 0, width, LANE_HEIGHT + EXPOSED_HEIGHT, "plot-exposed", words, digits=4)


def _ticks(drawn_s: float, height: float) -> Iterator[str]:
    for k in range(TICKS + 1):
        x = LEFT + (WIDTH - LEFT - RIGHT) * k / TICKS
        yield rule(x, 0, x, height)
        yield text(x, height + 16, seconds(drawn_s * k / TICKS), "plot-tick plot-time", "middle")


def _tools() -> str:
    buttons = (("in", "+", "Zoom in"), ("out", "−", "Zoom out"), ("left", "←", "Earlier"), ("right", "→", "Later"),
               ("all", "⤢", "Whole step"))  # fmt: skip
    made = (
        f'<button type="button" data-zoom="{name}" aria-label="{label}" title="{label}">{sign}</button>'
        for name, sign, label in buttons
    )
    return f'<div class="plot-tools" role="group" aria-label="Zoom the timeline">{"".join(made)}</div>'


def _legend() -> str:
    items = "".join(
        f'<li><span class="plot-key o-{kinds.split()[0]}"></span>{escape(words)}</li>' for words, kinds in KINDS.items()
    )
    return f'<ul class="plot-legend">{items}<li><span class="plot-key plot-exposed"></span>compute waits</li></ul>'


def _words(name: str, plot: TimelinePlot) -> str:
    waits = ", ".join(f"{seconds(s)} for {LANE_WORDS[stream]}" for stream, s in plot.exposed_s().items())
    return f"{name} {seconds(plot.step_s)}, compute waits {waits or 'for nothing'}"


def _table(plots: list[tuple[str, TimelinePlot]]) -> str:
    rows = [
        [
            name,
            lane.words,
            f"{lane.busy_share:.0%}",
            seconds(plot.exposed_s().get(lane.stream, 0.0)),
            format_bytes(sum(span.bytes for span in lane.spans)),
            str(len(lane.spans)),
        ]
        for name, plot in plots
        for lane in plot.lanes
    ]
    return data_table(["", "stream", "busy", "compute waits", "moved", "operations"], rows)
