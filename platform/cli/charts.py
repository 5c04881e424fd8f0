"""The facts of the plots drawn in a terminal: the same ones that pages and files draw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ...jobs.units import format_bytes
from ...schedulers.drawing import Line, PolicyMap, QueuePlot, SeriesPlot, TimelinePlot, UsageBar, thin
from ...schedulers.drawing.draw_map import LETTERS
from ...schedulers.drawing.elements import number
from .tables import seconds

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK = 30
_BAR = 24
_QUEUE_WIDTH, _QUEUE_ROWS = 36, 12
_COLOURS = {
    "gpu": "blue", "host": "yellow", "nvme": "magenta", "recompute": "bright_black",
    "none": "bright_black", "matmuls gpu": "green", "all gpu": "bright_green",
    "matmuls host": "yellow", "all host": "yellow",
}  # fmt: skip


def spark(line: Line, width: int = _SPARK) -> str:
    """The line in one row of blocks, the lowest value the lowest block; a gap is ``×``."""
    finite = line.finite
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    values = [line.values[k] for k in thin(line.values, width)]
    return "".join("×" if value is None else _block(value, low, high) for value in values)


def _block(value: float, low: float, high: float) -> str:
    share = (value - low) / (high - low) if high > low else 0.0
    return _BLOCKS[min(len(_BLOCKS) - 1, int(share * len(_BLOCKS)))]


def series_table(plots: Mapping[str, SeriesPlot]) -> Table:
    """Metrics, one a row: how they went, first, lowest, highest and last value."""
    table = Table(title="metrics")
    for column in ("", "over the steps", "first", "lowest", "highest", "last"):
        table.add_column(column, justify="left" if column in ("", "over the steps") else "right")
    for plot in plots.values():
        for line in plot.lines:
            finite = line.finite
            title = f"{plot.title} ({plot.unit})" if plot.unit else plot.title
            if finite:
                figures = (finite[0], min(finite), max(finite), finite[-1])
                table.add_row(escape(title), spark(line), *map(number, figures))
    return table


def map_text(facts: PolicyMap) -> Text:
    """The policy's map: letters in the colours of their homes."""
    text = Text()
    for name, tiles in (("boundaries ", facts.boundaries), ("layers     ", facts.layers)):
        text.append(name)
        for tile in tiles:
            letter = LETTERS[tile.kind][:1] or "·"
            text.append(letter, style=f"bold {_COLOURS[tile.kind]}" + (" underline" if tile.resident else ""))
        text.append("\n")
    words = (
        "G on the GPU, H on the host, N on NVMe, R recomputed; m products kept, a all kept; underlined: weights stay"
    )
    text.append(words, style="bright_black")
    return text


def lanes_table(predicted: TimelinePlot | None, measured: TimelinePlot | None) -> Table:
    """Streams of a step, the prediction beside the measurement: busy and exposed time."""
    plots = {name: plot for name, plot in (("predicted", predicted), ("measured", measured)) if plot is not None}
    table = Table(title="one step: " + ", ".join(f"{name} {seconds(plot.step_s)}" for name, plot in plots.items()))
    table.add_column("stream")
    for name in plots:
        for column in ("busy", "compute waits", "moved"):
            table.add_column(f"{name} {column}" if len(plots) > 1 else column, justify="right")
    lanes = {lane.stream: lane.words for plot in plots.values() for lane in plot.lanes}
    for stream, words in lanes.items():
        cells = [cell for plot in plots.values() for cell in _lane_cells(plot, stream)]
        table.add_row(words, *cells)
    return table


def _lane_cells(plot: TimelinePlot, stream: str) -> list[str]:
    lane = next((lane for lane in plot.lanes if lane.stream == stream), None)
    waits = plot.exposed_s().get(stream, 0.0)
    busy = f"{lane.busy_share:.0%}" if lane else ""
    moved = format_bytes(sum(span.bytes for span in lane.spans)) if lane else ""
    return [busy, f"[red]{seconds(waits)}[/red]" if waits else "", moved]


def usage_table(title: str, bars: Iterable[UsageBar]) -> Table:
    """Resources with a bar each."""
    table = Table(title=title, show_header=False)
    for bar in bars:
        share = min(1.0, bar.used / bar.total) if bar.total else 0.0
        filled = round(share * _BAR)
        drawn = Text("█" * filled, style="blue") + Text("░" * (_BAR - filled), style="bright_black")
        table.add_row(escape(bar.label), drawn, bar.words)
    return table


def queue_table(facts: QueuePlot) -> Table:
    """Expected times, one job a row; the left edge is now."""
    table = Table(title="expected start and end", show_header=False)
    last = max((bar.end_s for bar in facts.bars), default=0.0) or 1.0
    for bar in facts.bars[:_QUEUE_ROWS]:
        begin = round(max(0.0, bar.start_s) / last * _QUEUE_WIDTH)
        end = max(begin + 1, round(bar.end_s / last * _QUEUE_WIDTH))
        drawn = Text(" " * begin) + Text("█" * (end - begin), style="cyan" if bar.running else "bright_black")
        table.add_row(escape(bar.label), drawn, f"ends in {seconds(bar.end_s)}", bar.where)
    more = facts.left_out + max(0, len(facts.bars) - _QUEUE_ROWS)
    if more or facts.unknown:
        table.caption = f"{more} later, {facts.unknown} without a time"
    return table
