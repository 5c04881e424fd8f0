"""MLflow shows how a job ended, also when its process was killed or never began."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from lazytrain.jobs.lifecycle import JobState
from lazytrain.jobs.tracking import MLflowTracker, create_database
from lazytrain.jobs.tracking.record import JOB_ID, RECORD_FILE, RunRecord
from lazytrain.platform import tracking
from lazytrain.platform.artifacts import JobFiles
from lazytrain.platform.store import Job, NewJob, Role, Store
from lazytrain.platform.tracking import close_tracking

Ended = Callable[[JobState], Job]


@pytest.fixture
def ended(tmp_path: Path, empty_database: Path) -> Ended:
    store = Store(f"sqlite:///{shutil.copy(empty_database, tmp_path / 'store.db')}")
    new = NewJob(id="j-0000000001", user="ada", name="run", spec={"seed": 1}, run_dir=str(tmp_path / "run"), priority=1)
    store.people.add("ada", Role.SUBMITTER, 0.0)
    made, _ = store.jobs.create(new, 0.0)
    store.close()
    return lambda state: replace(made, state=state, sentence="so")


def test_a_run_whose_process_was_killed_is_ended(tmp_path: Path, ended: Ended) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    create_database(uri, "lab")
    JobFiles(tmp_path / "run").claim("j-0000000001")
    tracker = MLflowTracker(uri, "lab", "run", {}, {JOB_ID: "j-0000000001"}, tmp_path / "run")
    deadline = time.monotonic() + 30
    while tracker.run_id is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    tracker._give_up.set()  # nothing more is forwarded, as after a kill
    tracker._wake.set()
    tracker._thread.join(30)
    tracker.log(1, {"loss": 0.5})
    client = MlflowClient(tracking_uri=uri)
    assert client.get_run(tracker.run_id).info.status == "RUNNING"
    close_tracking(ended(JobState.FAILED), uri, "lab")
    close_tracking(ended(JobState.STOPPED), uri, "lab")  # what has ended is not ended again
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FAILED"
    assert run.data.metrics["loss"] == 0.5


def test_what_mlflow_knows_it_is_not_told_again(tmp_path: Path, ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a start of the controller every recent job comes up; to ask MLflow about each takes minutes."""
    JobFiles(tmp_path / "run").claim("j-0000000001")
    asked: list[object] = []

    def sync(folder: Path) -> None:
        asked.append(folder)
        record = RunRecord.load(folder / RECORD_FILE)
        record.status = None
        record.save()

    monkeypatch.setattr(tracking, "sync_run", sync)
    for _ in range(3):
        tracking.close_tracking(ended(JobState.FAILED), "sqlite:///x", "lab")
    assert asked == [tmp_path / "run"]


@pytest.mark.parametrize("claimed", [True, False])
def test_a_job_that_never_trained_has_a_run_that_says_why(tmp_path: Path, ended: Ended, claimed: bool) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    folder = tmp_path / "run"
    if claimed:
        JobFiles(folder).claim("j-0000000001")
    close_tracking(ended(JobState.REJECTED), uri, "lab")
    close_tracking(ended(JobState.REJECTED), uri, "lab")
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("lab").experiment_id])
    assert run.info.status == "FAILED"
    assert (run.data.tags["user"], run.data.tags["sentence"], run.data.params["seed"]) == ("ada", "so", "1")
    assert folder.exists() == claimed


def test_whoever_only_forwards_does_not_wait_for_torch_ray_or_a_solver() -> None:
    code = "import sys, lazytrain.platform.tracking; sys.exit(bool({'torch', 'ray', 'ortools'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
