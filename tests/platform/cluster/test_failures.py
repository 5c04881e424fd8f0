import pytest
import ray.exceptions
from ray.train import ControllerError, WorkerGroupError

from lazytrain.jobs.errors import LazytrainError, OutOfMemory
from lazytrain.platform.cluster.failures import translate


def test_the_workers_own_error_comes_back_as_it_is() -> None:
    ours = OutOfMemory(tier="gpu", requested_bytes=3, used_bytes=8, budget_bytes=10)
    error = translate(WorkerGroupError("rank 0 failed", {0: ours}))
    assert error is ours


def test_our_error_inside_a_controller_error() -> None:
    ours = LazytrainError("x")
    assert translate(ControllerError(WorkerGroupError("", {0: ours}))) is ours


def test_another_error_is_named_in_one_line() -> None:
    error = translate(WorkerGroupError("a long trace", {0: ValueError("bad rows\nmore")}))
    assert error.message == "the training process failed: ValueError: bad rows"
    assert isinstance(error.__cause__, WorkerGroupError)


@pytest.mark.parametrize("death", [ray.exceptions.WorkerCrashedError(), ray.exceptions.ActorDiedError()])
def test_a_process_that_died(death: Exception) -> None:
    error = translate(WorkerGroupError("", {0: death}))
    assert "died" in error.message
    assert "memory" in error.hint


def test_rays_memory_monitor_is_named() -> None:
    error = translate(ray.exceptions.OutOfMemoryError("worker killed at 97%"))
    assert "memory monitor" in error.message
    assert "97%" in error.message
    assert "LAZYTRAIN_RAY_MEMORY_THRESHOLD" in error.hint
