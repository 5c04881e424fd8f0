"""What run_training makes of a run's end; the runs themselves are stood in for, and real ones are in test_ray_runs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import WorkerGroupError

from lazytrain.jobs.errors import DataError, LazytrainError
from lazytrain.platform.cluster.port import TrainingOrder
from lazytrain.platform.cluster.training import run_training
from lazytrain.platform.cluster.worker import STOP_FILE


def follow(run_dir: Path, fit: Callable[[], Any], on_metrics: Callable[[Mapping[str, float]], None] = print) -> Any:
    order = TrainingOrder(job_id="j", spec=None, policy=None, device="cpu", run_dir=run_dir)  # type: ignore[arg-type]
    return run_training(order, on_metrics, cpus=1, stop_timeout_s=5, fit=fit)


def test_the_result_and_every_record(run_dir: Path) -> None:
    def fit() -> Any:
        lines = [json.dumps({"step": step, "loss": 1 / step}) for step in (1, 2, 3)]
        (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return SimpleNamespace(return_value="result")

    heard: list[Mapping[str, float]] = []
    assert follow(run_dir, fit, heard.append) == "result"
    assert [record["step"] for record in heard] == [1, 2, 3]


def test_an_error_that_the_worker_returned(run_dir: Path) -> None:
    with pytest.raises(DataError, match="no usable row"):
        follow(run_dir, lambda: SimpleNamespace(return_value=DataError("no usable row")))


def test_an_error_that_ray_raised(run_dir: Path) -> None:
    def fit() -> None:
        raise WorkerGroupError("trace", {0: RuntimeError("bus error")})

    with pytest.raises(LazytrainError, match="RuntimeError: bus error"):
        follow(run_dir, fit)


def test_a_run_without_a_result_is_no_success(run_dir: Path) -> None:
    with pytest.raises(LazytrainError, match="without a result"):
        follow(run_dir, lambda: SimpleNamespace(return_value=None))


def test_ctrl_c_asks_the_worker_to_stop(run_dir: Path) -> None:
    stopped_by: list[bool] = []

    def fit() -> None:
        (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
        while not (run_dir / STOP_FILE).exists():
            pass
        stopped_by.append(True)

    def interrupt(record: Mapping[str, float]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(run_dir, fit, interrupt)
    assert stopped_by == [True]


def test_an_old_request_to_stop_does_not_stop_a_new_run(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / STOP_FILE).touch()
    assert follow(run_dir, lambda: SimpleNamespace(return_value=not (run_dir / STOP_FILE).exists())) is True
