"""MLflow behind a local log: training writes to the log and never waits for MLflow."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import LazytrainError
from .database import client_class
from .forwarder import Forwarder
from .metric_log import MetricLog
from .record import RECORD_FILE, RunRecord
from .tracker import METRICS_FILE, Status

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 30.0
_LAST_PAUSE_S = 0.2


class MLflowTracker:
    """One MLflow run for one run directory, continued when the directory is used again.

    Metrics are appended to ``run_dir/metrics.jsonl``; a background thread forwards them every ``interval_s`` seconds,
    or every ``batch_steps`` reports. While MLflow cannot be reached the log grows and nothing else happens.

    - The run's id is kept in ``run_dir/mlflow_run.json``. Without it the run is found by its tag ``lazytrain.job_id``,
      which ``tags`` may give, before one is created.
    - ``params`` may be nested. Values over 250 characters are cut, and all of them are kept in the artifact
      ``params.json``. Settings that differ from the first attempt's are named in a tag ``changed.attemptN``.
    - Values that are not finite are not sent; the metric ``nonfinite/NAME`` counts them and a tag of that name is set.

    Raises InputError when mlflow is not installed.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        run_dir: str | os.PathLike[str],
        *,
        interval_s: float = 2.0,
        batch_steps: int = 50,
        finish_timeout_s: float = 20.0,
    ) -> None:
        client_class()
        self._run_dir = Path(run_dir)
        self._log = MetricLog(self._run_dir / METRICS_FILE)
        record = RunRecord.open(
            self._run_dir / RECORD_FILE, uri=uri, experiment=experiment, run_name=run_name, params=params, tags=tags
        )
        self._forwarder = Forwarder(record, self._log.path)
        self._interval_s = interval_s
        self._batch_steps = batch_steps
        self._finish_timeout_s = finish_timeout_s
        self._waiting = 0
        self._wake, self._finishing, self._give_up = threading.Event(), threading.Event(), threading.Event()
        self._wake.set()  # the run appears at once, not after the first interval
        self._thread = threading.Thread(target=self._forward, name="mlflow-forwarder", daemon=True)
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """The MLflow run, once it is known."""
        return self._forwarder.record.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append to the local log; returns at once."""
        if self._log.append(step, metrics):
            self._waiting += 1
        if self._waiting >= self._batch_steps:
            self._waiting = 0
            self._wake.set()

    def artifact(self, path: str | os.PathLike[str]) -> None:
        """Send the file as it is when its turn comes; returns at once."""
        absolute, run_dir = Path(path).absolute(), self._run_dir.absolute()
        name = absolute.relative_to(run_dir) if absolute.is_relative_to(run_dir) else absolute
        with self._forwarder.lock:
            self._forwarder.record.artifacts.append(str(name))
            self._forwarder.record.save()
        self._wake.set()

    def finish(self, status: Status) -> None:
        """Forward the rest and end the run; waits ``finish_timeout_s`` at most.

        What could not be sent by then stays in the run directory, for ``sync_run`` or the next attempt.
        """
        if self._finishing.is_set():
            return
        with self._forwarder.lock:
            self._forwarder.record.end(status)
        self._finishing.set()
        self._wake.set()
        self._thread.join(self._finish_timeout_s)
        self._give_up.set()
        self._log.close()
        if self._thread.is_alive():
            log.warning("MLflow has not taken all of %s: the rest waits in that directory", self._run_dir)

    def _forward(self) -> None:
        """The background thread: send, and while that fails try again ever less often."""
        pause_s = 0.0
        while not self._give_up.is_set():
            self._pause(pause_s)
            last = self._finishing.is_set()
            try:
                self._forwarder.send()
            except Exception as error:  # whatever MLflow, SQL or HTTP raise: an outage must not reach training
                if not pause_s:
                    log.warning("MLflow does not take the metrics, they are kept in %s: %s", self._log.path, error)
                pause_s = min(2 * pause_s or self._interval_s, _LONGEST_PAUSE_S)
                continue
            if last:
                return
            pause_s = 0.0

    def _pause(self, outage_s: float) -> None:
        if not outage_s:
            self._wake.wait(self._interval_s)
            self._wake.clear()
        elif self._finishing.is_set():
            self._give_up.wait(_LAST_PAUSE_S)
        else:
            self._finishing.wait(outage_s)


def end_lost_run(run_dir: str | os.PathLike[str]) -> bool:
    """Forward a run whose last process never said how it ended, as FAILED, or could not say it to MLflow.

    Whether it was such a run. Nobody may be training in ``run_dir``. Raises LazytrainError when MLflow does not answer.
    """
    path = Path(run_dir) / RECORD_FILE
    if not path.exists():
        return False
    record = RunRecord.load(path)
    if record.ended and record.status is None:
        return False
    if not record.ended:
        record.end("FAILED")
    sync_run(run_dir)
    return True


def sync_run(run_dir: str | os.PathLike[str]) -> None:
    """Forward what an ended process could not: metrics, artifacts, final status. Raises LazytrainError if it fails."""
    directory = Path(run_dir)
    try:
        Forwarder(RunRecord.load(directory / RECORD_FILE), directory / METRICS_FILE).send()
    except Exception as error:  # MLflow, SQL and HTTP each have their own
        raise LazytrainError(
            f"cannot forward {directory} to MLflow: {error}", hint="try again when it answers"
        ) from error
