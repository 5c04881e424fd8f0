"""Every plot as two functions: its facts as plain values, and the facts drawn as HTML and SVG text.

They lie here, below the platform, so that ``lazytrain show``, ``top`` and ``--html`` and the web pages draw the same
facts alike. `platform.facts` takes them from the API's answers. Drawing is pure: it reads no clock, file or network,
all text in it is escaped, and colours are classes of ``plots.css``, one set for light and one for dark. No style or
script stands in the markup, so that a strict content security policy holds.
"""

from .draw_map import draw_map_legend, draw_policy_map
from .draw_series import draw_series
from .draw_timeline import draw_timelines
from .facts import ExposedSpan, Lane, LaneSpan, PolicyMap, Tile, TimelinePlot, policy_map, timeline_plot
from .page import SCRIPT, STYLE, document, grid, page
from .queue import QueueBar, QueuePlot, draw_queue, queue_plot
from .series import MOST_POINTS, Line, SeriesPlot, line, series_plot, thin
from .usage import UsageBar, draw_usage

__all__ = [
    "MOST_POINTS",
    "SCRIPT",
    "STYLE",
    "ExposedSpan",
    "Lane",
    "LaneSpan",
    "Line",
    "PolicyMap",
    "QueueBar",
    "QueuePlot",
    "SeriesPlot",
    "Tile",
    "TimelinePlot",
    "UsageBar",
    "document",
    "draw_map_legend",
    "draw_policy_map",
    "draw_queue",
    "draw_series",
    "draw_timelines",
    "draw_usage",
    "grid",
    "line",
    "page",
    "policy_map",
    "queue_plot",
    "series_plot",
    "thin",
    "timeline_plot",
]
