"""MLflow shows how a job ended, also when its process was killed."""

import time
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from lazytrain.jobs.lifecycle import JobState
from lazytrain.jobs.tracking import MLflowTracker, create_database
from lazytrain.platform.controller import Config
from lazytrain.platform.controller.close_tracking import close_tracking

World = Any


def test_a_run_whose_process_was_killed_is_ended(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    create_database(uri, "lab")
    tracker = MLflowTracker(uri, "lab", "run", {}, {}, tmp_path / "run")
    deadline = time.monotonic() + 30
    while tracker.run_id is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    tracker._give_up.set()  # nothing more is forwarded, as after a kill
    tracker._wake.set()
    tracker._thread.join(30)
    tracker.log(1, {"loss": 0.5})
    assert MlflowClient(tracking_uri=uri).get_run(tracker.run_id).info.status == "RUNNING"
    close_tracking(tmp_path / "run", "FAILED")
    run = MlflowClient(tracking_uri=uri).get_run(tracker.run_id)
    assert run.info.status == "FAILED"
    assert run.data.metrics["loss"] == 0.5
    close_tracking(tmp_path / "none", "FAILED")  # a job that never ran has no MLflow run


def test_every_end_of_a_job_that_ran_is_told(world: World) -> None:
    told: list[tuple[str, str]] = []
    world.config = Config(
        mlflow_uri="sqlite:///x", close_tracking=lambda run_dir, status: told.append((run_dir, status))
    )
    world.new_controller()
    job, never = world.submit(), world.submit(resources={"gpu": ["A10"]})
    run = world.running(job)
    assert run.order.tracking["tags"]["lazytrain.job_id"] == job.id
    world.end(job, how="error", code="invalid_data", message="x", final=True)
    world.ask(never, "stop")
    world.steps(2)
    assert (world.state(job), world.state(never)) == (JobState.FAILED, JobState.STOPPED)
    assert told == [(job.run_dir, "FAILED")]
