"""Where a run's figures go: a local log first, MLflow when it can be reached."""

from __future__ import annotations

from .database import create_database
from .metric_log import MetricLog, read_metrics
from .mlflow_tracker import MLflowTracker, end_lost_run, sync_run
from .system import SystemMetrics
from .tracker import LocalTracker, NullTracker, Status, Tracker

__all__ = [
    "LocalTracker",
    "MLflowTracker",
    "MetricLog",
    "NullTracker",
    "Status",
    "SystemMetrics",
    "Tracker",
    "create_database",
    "end_lost_run",
    "read_metrics",
    "sync_run",
]
