"""The controller's process."""

import socket
from pathlib import Path

import pytest

from lazytrain.jobs.errors import InputError
from lazytrain.platform.controller import service
from lazytrain.platform.settings import Settings


def test_it_starts_while_mlflow_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its jobs keep their figures and hand them on later."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and nobody listens
        uri = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert service._mlflow(Settings(home=tmp_path, mlflow_uri=uri)) == uri


def test_without_mlflow_no_job_has_a_run_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(uri: str, experiment: str) -> str:
        raise InputError("mlflow is not installed")

    monkeypatch.setattr(service, "create_database", missing)
    assert service._mlflow(Settings(home=tmp_path)) == ""
