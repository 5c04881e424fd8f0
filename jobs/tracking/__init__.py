"""Where a run's figures go: a local log first, MLflow when it can be reached."""

from __future__ import annotations

from .database import create_database
from .metric_log import MetricLog, read_metrics
from .mlflow_tracker import MLflowTracker, sync_run
from .tracker import LocalTracker, NullTracker, Status, Tracker

__all__ = [
    "LocalTracker",
    "MLflowTracker",
    "MetricLog",
    "NullTracker",
    "Status",
    "Tracker",
    "create_database",
    "read_metrics",
    "sync_run",
]
