"""The one place where an MLflow store and its experiments come into being."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import InputError, LazytrainError

_SQLITE = "sqlite:///"
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # The forwarder has its own retries; a call must not hang for the minutes that MLflow's defaults allow.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}


def create_database(uri: str, experiment: str) -> str:
    """Create the MLflow store at ``uri``, if it is a SQLite file that is not there, and the experiment; return its id.

    Safe to call from many processes at once (MLflow's own first start is not: half-made tables are left behind);
    the platform calls it before it starts any writer. Artifacts of a SQLite store go beside the file.
    Raises LazytrainError for an experiment that somebody has deleted: MLflow lets no run begin in it.
    """
    client = connect(uri)
    with _alone(uri) as database:
        found = client.get_experiment_by_name(experiment)
        if found is not None and found.lifecycle_stage == "deleted":
            restore = f"mlflow experiments restore --experiment-id {found.experiment_id}"
            raise LazytrainError(f"the experiment {experiment} was deleted in MLflow", hint=restore)
        if found is not None:
            return str(found.experiment_id)
        location = (database.parent / "mlartifacts").as_uri() if database else None
        return str(client.create_experiment(experiment, artifact_location=location))


def connect(uri: str) -> Any:
    """An MLflow client for ``uri``; no global setting of MLflow is touched."""
    client = client_class()
    with _alone(uri):
        return client(tracking_uri=uri)


def client_class() -> Any:
    """``MlflowClient``; InputError when mlflow is not installed."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise InputError("mlflow is not installed", hint="pip install mlflow, or train without a tracker") from error
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient


@contextmanager
def _alone(uri: str) -> Iterator[Path | None]:
    """For a SQLite store: its file's path, with no other process creating it during the block."""
    if not uri.startswith(_SQLITE) or uri == _SQLITE:
        yield None
        return
    database = Path(uri.removeprefix(_SQLITE)).absolute()
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name(database.name + ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield database
