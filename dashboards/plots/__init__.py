"""All plots, drawn as HTML and SVG text that is safe to put on a page. They live in `schedulers.drawing`.

A page needs `STYLE` and `SCRIPT` as files of its own; without the script everything is there but zooming.
"""

from ...schedulers.drawing import (
    SCRIPT,
    STYLE,
    draw_map_legend,
    draw_policy_map,
    draw_queue,
    draw_series,
    draw_timelines,
    draw_usage,
    grid,
)

__all__ = [
    "SCRIPT",
    "STYLE",
    "draw_map_legend",
    "draw_policy_map",
    "draw_queue",
    "draw_series",
    "draw_timelines",
    "draw_usage",
    "grid",
]
