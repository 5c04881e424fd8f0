"""Plans and timelines as pictures: the facts of a plot, and the plot as one HTML file that opens without a server."""

from .facts import Lane, LaneSpan, PolicyMap, Tile, TimelinePlot, policy_map, timeline_plot
from .page import page
from .svg import draw_policy_map, draw_timeline

__all__ = [
    "Lane",
    "LaneSpan",
    "PolicyMap",
    "Tile",
    "TimelinePlot",
    "draw_policy_map",
    "draw_timeline",
    "page",
    "policy_map",
    "timeline_plot",
]
