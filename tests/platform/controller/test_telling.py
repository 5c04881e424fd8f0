"""What happened to jobs is told to MLflow, one process at a time."""

import importlib.util
import subprocess
import sys
import threading
from queue import SimpleQueue
from typing import Any

import pytest

from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.controller import Config
from lazytrain.platform.controller.telling import JOBS_THAT_ENDED, RUNS_THAT_DIED, Telling

World = Any


@pytest.mark.parametrize("first", [False, True])
def test_what_happened_is_told_by_one_process_at_a_time(first: bool) -> None:
    begun: SimpleQueue[list[str]] = SimpleQueue()
    go_on = threading.Semaphore(0)

    def run(found: list[str]) -> None:
        begun.put(found)
        go_on.acquire()

    tell = Telling("a.module", first=first, run=run)
    if not first:
        tell("before")
    assert begun.get(timeout=20) == ([] if first else ["before"])
    for name in ("a", "b", "c"):
        tell(name)
    assert begun.empty()
    go_on.release()
    assert begun.get(timeout=20) == ["a", "b", "c"]


@pytest.mark.parametrize("module", [JOBS_THAT_ENDED, RUNS_THAT_DIED])
def test_the_modules_that_are_run_can_be(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


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


def test_one_that_cannot_be_told_keeps_no_other_from_it() -> None:
    told: SimpleQueue[list[str]] = SimpleQueue()

    def run(found: list[str]) -> None:
        told.put(found)
        if found == ["a"]:
            raise BlockingIOError("no process to be had")
        if found == ["b"]:
            raise subprocess.TimeoutExpired("mlflow", 600)

    tell = Telling("a.module", run=run)
    for name in ("a", "b", "c"):
        tell(name)
        assert told.get(timeout=20) == [name]
