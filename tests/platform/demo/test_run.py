"""The demo's flow with a cluster that runs everything here; the real one is in test_demo."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import LazytrainError
from lazytrain.jobs.train import Result, train
from lazytrain.platform.cluster import Node, TrainingOrder
from lazytrain.platform.cluster.worker import _tracker
from lazytrain.platform.demo import inputs
from lazytrain.platform.demo import run as demo
from lazytrain.platform.settings import Settings
from lazytrain.platform.tuning import Search, SearchOrder, Trial
from lazytrain.schedulers.hardware import HardwareProfile


class Collected:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.lines: list[str] = []
        self.steps: list[float] = []

    def stage(self, title: str, total: "float | None" = None) -> None:
        self.stages.append(title)

    def advance(self, done: float, text: str = "") -> None:
        self.steps.append(done)

    def say(self, text: str) -> None:
        self.lines.append(text)


class Here:
    """The cluster port, in this process."""

    def __init__(self, settings: Settings) -> None:
        self.orders: list[TrainingOrder] = []
        self.closed = 0
        self.fails = False

    def nodes(self) -> list[Node]:
        return [Node("n", "127.0.0.1", "demo-gpu", 2, 1)]

    def profile(self, base: HardwareProfile, nvme_dir: "Path | None") -> HardwareProfile:
        if self.fails:
            raise LazytrainError("the actor died")
        assert nvme_dir is not None
        assert nvme_dir.is_dir()
        measured = {"matmul_flops": {"float32": 4e10}, "update_parameters_s": 5e7, "host_bytes_s": 1e10}
        return base.model_copy(update=measured)

    def train(self, order: TrainingOrder, on_metrics: Callable[[Mapping[str, float]], None]) -> Result:
        self.orders.append(order)
        return train(
            order.spec,
            policy=order.policy,
            device=order.device,
            run_dir=order.run_dir,
            tracker=_tracker(order.tracking, order.run_dir),
            progress=on_metrics,
        )

    def close(self) -> None:
        self.closed += 1


def search_here(order: SearchOrder, on_trial: Callable[[Trial], None]) -> Search:
    """One probe, of the batch that the budgets were made for."""
    facts, plan = order.plan_batch(demo.BATCH)
    assert plan.policy is not None
    trial = Trial(demo.BATCH, order.run(plan.policy, facts), plan, facts)
    on_trial(trial)
    return Search(trial, [trial])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(inputs, "_TRAIN_ROWS", 64)
    monkeypatch.setattr(inputs, "_EVAL_ROWS", 4)
    yield


def run(directory: Path, cluster: Here, reporter: "Collected | None" = None) -> demo.Outcome:
    return demo.run_demo(
        directory, Settings(home=directory), reporter or Collected(), open_cluster=lambda settings: cluster,
        run_search=search_here,
    )  # fmt: skip


@pytest.mark.usefixtures("small")
def test_the_whole_flow_and_its_answer(tmp_path: Path) -> None:
    cluster, reporter = Here(Settings()), Collected()
    outcome = run(tmp_path, cluster, reporter)
    answer: dict[str, Any] = outcome.to_dict()
    promised = {
        "exact_match_before", "exact_match", "seconds", "boundaries", "predicted_step_s", "measured_step_s",
        "mlflow_run", "batch", "device_budget_bytes", "plain_training_bytes",
    }  # fmt: skip
    assert promised <= set(answer)
    assert set(answer["boundaries"]) == {"gpu", "host", "nvme", "recompute"}
    assert answer["boundaries"]["host"] + answer["boundaries"]["nvme"] > 0
    assert answer["batch"] == demo.BATCH
    assert answer["peak_device_bytes"] <= answer["device_budget_bytes"] < answer["plain_training_bytes"] / 3
    assert answer["predicted_step_s"] > 0
    assert outcome.profile.efficiency != 0.5  # calibrated by the probe
    (order,) = cluster.orders
    assert order.spec.train.batch == demo.BATCH
    assert order.device.memory_bytes == answer["device_budget_bytes"]
    assert reporter.steps[-1] == answer["steps"] == 2
    assert any("calibrated" in line for line in reporter.lines)
    assert cluster.closed == 1


@pytest.mark.usefixtures("small")
def test_mlflow_has_the_run(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    outcome = run(tmp_path, Here(Settings()))
    client = MlflowClient(outcome.mlflow_uri)
    found = client.get_run(outcome.mlflow_run)
    assert found.info.status == "FINISHED"
    assert found.data.tags["gpu"] == "demo-gpu"
    assert found.data.params["train.batch"] == str(demo.BATCH)
    assert [metric.step for metric in client.get_metric_history(outcome.mlflow_run, "loss")] == [1, 2]


@pytest.mark.usefixtures("small")
def test_a_second_demo_is_a_second_run(tmp_path: Path) -> None:
    cluster = Here(Settings())
    runs = {run(tmp_path, cluster).mlflow_run, run(tmp_path, cluster).mlflow_run}
    assert len(runs) == 2
    assert {path.name for path in tmp_path.glob("run-*")} == {"run-001", "run-002"}
    assert len({order.job_id for order in cluster.orders}) == 2


@pytest.mark.usefixtures("small")
def test_the_cluster_is_closed_when_something_fails(tmp_path: Path) -> None:
    cluster = Here(Settings())
    cluster.fails = True
    with pytest.raises(LazytrainError, match="the actor died"):
        run(tmp_path, cluster)
    assert cluster.closed == 1
