"""Facts of all plots, collected from the API's answers. They live in `platform.facts`, where commands can use them."""

from ...platform.facts import (
    METRICS,
    Metric,
    StepTimes,
    job_map,
    job_timelines,
    lab_usage,
    map_of,
    node_usage,
    queue_facts,
    run_series,
    step_times,
    timeline_of,
)

__all__ = [
    "METRICS",
    "Metric",
    "StepTimes",
    "job_map",
    "job_timelines",
    "lab_usage",
    "map_of",
    "node_usage",
    "queue_facts",
    "run_series",
    "step_times",
    "timeline_of",
]
