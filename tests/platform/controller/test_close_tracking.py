"""Every end is told to MLflow, one process at a time."""

import subprocess
import sys
import threading
from queue import SimpleQueue
from typing import Any

from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.controller import Config
from lazytrain.platform.controller.close_tracking import TrackingCloser

World = Any


def test_ends_are_told_by_one_process_at_a_time() -> None:
    begun: SimpleQueue[list[str]] = SimpleQueue()
    go_on = threading.Semaphore(0)

    def run(jobs: list[str]) -> None:
        begun.put(jobs)
        go_on.acquire()

    closer = TrackingCloser(run)
    assert begun.get(timeout=20) == []  # what the controller before this one may have left
    for name in ("a", "b", "c"):
        closer(name)
    assert begun.empty()
    go_on.release()
    assert begun.get(timeout=20) == ["a", "b", "c"]


def test_every_end_is_told(world: World) -> None:
    told: list[str] = []
    world.config = Config(mlflow_uri="sqlite:///x", close_tracking=told.append)
    world.new_controller()
    job, never = world.submit(), world.submit(resources={"gpu": ["A10"]})
    run = world.running(job)
    assert run.order.tracking["tags"]["lazytrain.job_id"] == job.id
    world.end(job, how="error", code="invalid_data", message="x", final=True)
    world.ask(never, "stop")
    world.steps(2)
    assert (world.state(job), world.state(never)) == (JobState.FAILED, JobState.STOPPED)
    assert sorted(told) == sorted([job.id, never.id])


def test_the_controller_comes_back_without_waiting_for_torch() -> None:
    code = "import sys, lazytrain.platform.controller.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
