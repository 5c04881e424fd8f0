"""What the training loop knows of tracking, and the two ways that need no server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from .metric_log import MetricLog

METRICS_FILE = "metrics.jsonl"

Status = Literal["FINISHED", "FAILED", "KILLED"]
"""How a run ended, in MLflow's words: it is done, it raised an error, somebody stopped it."""


class Tracker(Protocol):
    """Takes what a run reports. No method waits for a network or raises because something far away is down."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report metrics of a step; of a metric and step that were reported before, the first report counts."""

    def artifact(self, path: str | os.PathLike[str]) -> None:
        """Keep a file with the run."""

    def finish(self, status: Status) -> None:
        """Report how the run ended; the last call."""


class NullTracker:
    """Forgets everything."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def artifact(self, path: str | os.PathLike[str]) -> None:
        """Nothing."""

    def finish(self, status: Status) -> None:
        """Nothing."""


class LocalTracker:
    """Keeps metrics in ``run_dir/metrics.jsonl``; artifacts are files of the run directory already."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._log = MetricLog(Path(run_dir) / METRICS_FILE)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append to the log."""
        self._log.append(step, metrics)

    def artifact(self, path: str | os.PathLike[str]) -> None:
        """Nothing: the file stays where it is."""

    def finish(self, status: Status) -> None:
        """Close the log."""
        self._log.close()
