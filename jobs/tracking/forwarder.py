"""Brings an MLflow run up to what the run directory says: as often as needed, nothing missing, nothing twice."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import LazytrainError
from .database import connect, create_database
from .metric_log import NON_FINITE, Row, read_from
from .record import JOB_ID, RunRecord

_BATCH_METRICS = 1000
"""MLflow's limit for one request; of params it is 100."""
_BATCH_PARAMS = 100
_PARAM_CHARACTERS = 250
_NAME_CHARACTERS = 250
_TAG_CHARACTERS = 5000
_REFUSED = re.compile(r"[^\w\-. :/]")
log = logging.getLogger(__name__)

ATTEMPT = "lazytrain.attempt"
_FINAL = ("FINISHED", "FAILED", "KILLED")


class Forwarder:
    """Sends what is new since the last call.

    ``send`` raises whatever MLflow, its store or the network raise, and LazytrainError for a run or an experiment that
    somebody has deleted there; called again it goes on where it was.
    """

    def __init__(self, record: RunRecord, metrics: Path) -> None:
        self.record = record
        self.lock = threading.Lock()
        """Held while the record changes."""
        self._metrics = metrics
        self._client: Any = None
        self._highest: dict[str, int] = {}

    def send(self) -> None:
        """Make or find the run, then send description, metrics, artifacts and, when there is one, the final status."""
        if self._client is None:
            self._attach()
        if self.record.described < self.record.attempt:
            self._describe()
        self._send_metrics()
        self._send_artifacts()
        if self.record.status is not None:
            self._terminate(self.record.status)

    def _attach(self) -> None:
        """Find the run before making one: an answer that was lost must not leave a second, empty run."""
        experiment_id = create_database(self.record.uri, self.record.experiment)
        client = connect(self.record.uri)
        if self.record.run_id is not None and _run(client, self.record.run_id) is None:
            self._forget()
        run_id = self.record.run_id or _find_run(client, experiment_id, self.record.job_id)
        if run_id is None:
            tags = {JOB_ID: self.record.job_id}
            run_id = client.create_run(experiment_id, tags=tags, run_name=self.record.run_name).info.run_id
        else:
            self._reopen(client, run_id)
        with self.lock:
            self.record.run_id = run_id
            self.record.save()
        self._client = client

    def _forget(self) -> None:
        """MLflow has lost the run (a store that was set up anew, a run that was purged): another gets the whole log."""
        log.warning("run %s is no longer in MLflow: another one is made", self.record.run_id)
        with self.lock:
            self.record.run_id, self.record.described, self.record.offset, self.record.step = None, 0, 0, -1

    def _reopen(self, client: Any, run_id: str) -> None:
        """Go on with a run that is there: know its steps, count this attempt, mark it as running."""
        run = _active(client, run_id)
        if self.record.run_id is None:
            self.record.attempt = max(self.record.attempt, int(run.data.tags.get(ATTEMPT, 0)) + 1)
        if run.info.status in _FINAL and self.record.described < self.record.attempt:
            client.update_run(run_id, status="RUNNING")
        for name in run.data.metrics:
            self._highest[name] = max(point.step for point in client.get_metric_history(run_id, name))

    def _describe(self) -> None:
        from mlflow.entities import Param, RunTag

        text = json.dumps(self.record.params, indent=1, sort_keys=True)
        params = {_allowed(name): value[:_PARAM_CHARACTERS] for name, value in self.record.params.items()}
        params["config_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        there = self._client.get_run(self.record.run_id).data.params
        new = [Param(name, value) for name, value in params.items() if name not in there]
        for start in range(0, len(new), _BATCH_PARAMS):
            self._request(params=new[start : start + _BATCH_PARAMS])
        tags = {_allowed(name): value[:_TAG_CHARACTERS] for name, value in self.record.tags.items()}
        tags |= {JOB_ID: self.record.job_id, ATTEMPT: str(self.record.attempt)}
        changed = sorted(name for name, value in params.items() if there.get(name, value) != value)
        if changed:
            tags[f"changed.attempt{self.record.attempt}"] = ", ".join(changed)[:_TAG_CHARACTERS]
        self._request(tags=[RunTag(name, value) for name, value in tags.items()])
        if any(len(value) > _PARAM_CHARACTERS for value in self.record.params.values()):
            self._client.log_text(self.record.run_id, text, "params.json")
        with self.lock:
            self.record.described = self.record.attempt
            self.record.save()

    def _send_metrics(self) -> None:
        from mlflow.entities import Metric, RunTag

        for rows, offset in _batches(read_from(self._metrics, self.record.offset)):
            metrics, bad = [], set()
            for row in rows:
                for name, value in self._new(row):
                    metrics.append(Metric(_allowed(name), value, int(row["time"] * 1000), row["step"]))
                    if name.startswith(NON_FINITE):
                        bad.add(name.removeprefix(NON_FINITE))
            tags = [RunTag(f"{NON_FINITE}{_allowed(name)}", "true") for name in sorted(bad)]
            for start in range(0, len(metrics), _BATCH_METRICS):
                self._request(metrics=metrics[start : start + _BATCH_METRICS], tags=tags)
            with self.lock:
                self.record.offset = offset
                self.record.step = max(self.record.step, *(row["step"] for row in rows))
                self.record.save()

    def _request(self, **batch: Any) -> None:
        """Send it; what MLflow will never accept is reported and passed over, or nothing after it would arrive."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(self.record.run_id, **batch)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            _active(self._client, self.record.run_id)
            log.error("MLflow refuses %s of run %s: %s", " and ".join(batch), self.record.run_id, error)

    def _new(self, row: Row) -> Iterator[tuple[str, float]]:
        """The row's finite values that the run did not have when this process found it."""
        for name, value in row.items():
            if name in ("step", "time") or value is None:
                continue
            if row["step"] > self._highest.get(_allowed(name), -1):
                yield name, value

    def _send_artifacts(self) -> None:
        while self.record.artifacts:
            path = self._metrics.parent / self.record.artifacts[0]
            if path.exists():
                self._client.log_artifact(self.record.run_id, str(path))
            with self.lock:
                del self.record.artifacts[0]
                self.record.save()

    def _terminate(self, status: str) -> None:
        """End the run, unless somebody else (the platform, a person) has said how it ended."""
        if _active(self._client, self.record.run_id).info.status not in _FINAL:
            self._client.set_terminated(self.record.run_id, status)
        with self.lock:
            self.record.status = None
            self.record.save()


def _find_run(client: Any, experiment_id: str, job_id: str) -> str | None:
    found = client.search_runs(
        [experiment_id], f"tags.`{JOB_ID}` = '{job_id}'", order_by=["attributes.start_time ASC"], max_results=1
    )
    return found[0].info.run_id if found else None


def _run(client: Any, run_id: str) -> Any:
    """The run; None if MLflow does not know it, or no longer."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _active(client: Any, run_id: str | None) -> Any:
    """The run. Raises LazytrainError if somebody has deleted it: only they can want it back."""
    run = client.get_run(run_id)
    if run.info.lifecycle_stage == "deleted":
        raise LazytrainError(f"run {run_id} was deleted in MLflow", hint=f"mlflow runs restore --run-id {run_id}")
    return run


def _allowed(name: str) -> str:
    """The name without characters that MLflow refuses, and not longer than it takes."""
    return _REFUSED.sub("_", name)[:_NAME_CHARACTERS]


def _batches(rows: Iterator[tuple[Row, int]]) -> Iterator[tuple[list[Row], int]]:
    """Rows in groups of about one request, each with the log offset behind it."""
    group: list[Row] = []
    size, offset = 0, 0
    for row, offset in rows:
        group.append(row)
        size += len(row)
        if size >= _BATCH_METRICS // 2:
            yield group, offset
            group, size = [], 0
    if group:
        yield group, offset
