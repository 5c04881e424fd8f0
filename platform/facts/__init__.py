"""From the API's answers to the facts of the plots (`schedulers.drawing`): the first of every plot's two functions.

It lies in the platform because ``lazytrain show``, ``top`` and ``--html`` need it as well as the pages.
"""

from .machines import lab_usage, node_usage
from .queue import queue_facts
from .report import job_report
from .runs import METRICS, Metric, StepTimes, job_map, job_timelines, map_of, run_series, step_times, timeline_of

__all__ = [
    "METRICS",
    "Metric",
    "StepTimes",
    "job_map",
    "job_report",
    "job_timelines",
    "lab_usage",
    "map_of",
    "node_usage",
    "queue_facts",
    "run_series",
    "step_times",
    "timeline_of",
]
