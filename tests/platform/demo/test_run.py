"""The demo's flow with a cluster that runs everything here; the real one is in test_demo."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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

PROBE_S = 0.1


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
    """One probe, of the batch that the budgets were made for, as long as the settings say."""
    assert isinstance(order.run, partial)
    assert order.run.args[0].seconds == PROBE_S
    facts, plan = order.plan_batch(demo.BATCH)
    assert plan.policy is not None
    trial = Trial(demo.BATCH, order.run(plan.policy, facts), plan, facts)
    on_trial(trial)
    return Search(trial, [trial])


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "_TRAIN_ROWS", 64)
        patch.setattr(inputs, "_EVAL_ROWS", 4)
        yield


def run(directory: Path, cluster: Here, reporter: "Collected | None" = None) -> demo.Outcome:
    return demo.run_demo(
        directory,
        Settings(home=directory, probe_s=PROBE_S),
        reporter or Collected(),
        open_cluster=lambda settings: cluster,
        run_search=search_here,
    )


class Ran(NamedTuple):
    """One run of the demo."""

    cluster: Here
    reporter: Collected
    outcome: demo.Outcome


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def runs(small: None, folder: Path) -> list[Ran]:
    """Two, one after the other in one folder."""

    def once() -> Ran:
        cluster, reporter = Here(Settings()), Collected()
        return Ran(cluster, reporter, run(folder, cluster, reporter))

    return [once(), once()]


def test_the_whole_flow_and_its_answer(runs: list[Ran]) -> None:
    cluster, reporter, outcome = runs[0]
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


def test_mlflow_has_the_run(runs: list[Ran]) -> None:
    from mlflow import MlflowClient

    outcome = runs[0].outcome
    client = MlflowClient(outcome.mlflow_uri)
    found = client.get_run(outcome.mlflow_run)
    assert found.info.status == "FINISHED"
    assert found.data.tags["gpu"] == "demo-gpu"
    assert found.data.params["train.batch"] == str(demo.BATCH)
    assert [metric.step for metric in client.get_metric_history(outcome.mlflow_run, "loss")] == [1, 2]


def test_a_second_demo_is_a_second_run(runs: list[Ran], folder: Path) -> None:
    assert len({ran.outcome.mlflow_run for ran in runs}) == 2
    assert {path.name for path in folder.glob("run-*")} == {"run-001", "run-002"}
    assert len({order.job_id for ran in runs for order in ran.cluster.orders}) == 2


@pytest.mark.usefixtures("small")
def test_the_cluster_is_closed_when_something_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "create_database", lambda uri, experiment: None)  # takes seconds, and is not used
    cluster = Here(Settings())
    cluster.fails = True
    with pytest.raises(LazytrainError, match="the actor died"):
        run(tmp_path, cluster)
    assert cluster.closed == 1
