from __future__ import annotations

import json
from pathlib import Path

import pytest

from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.tracking import read_metrics
from lazytrain.jobs.train import reconcile, train


def test_a_run_that_is_under_way_is_not_lost(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`end_lost_run` itself is tested with MLflow, beside the tracker."""
    run, asked = job.parent / "run", []
    monkeypatch.setattr("lazytrain.jobs.train.lost.end_lost_run", lambda path: asked.append(path) or True)
    spec = load_spec(job, ["data.split={train: 1.0}", "train.max_steps=2"])
    train(spec, device="cpu", on_point=lambda name: asked.append("lost") if name == "step" and reconcile(run) else None)
    assert asked == []
    assert reconcile(run)
    assert asked == [run]


def test_a_run_says_what_it_takes_and_sends_its_plan_at_once(job: Path) -> None:
    sent: list[str] = []

    class Tracker:
        def log(self, step: int, metrics: dict[str, float]) -> None:
            sent.extend(name for name in metrics if name.startswith("system/"))

        def artifact(self, path: Path) -> None:
            sent.append(Path(path).name)

        def finish(self, status: str) -> None:
            sent.append(status)

    train(load_spec(job, ["data.split={train: 1.0}", "train.max_steps=1"]), device="cpu", tracker=Tracker())
    assert sent[:2] == ["job.yaml", "policy.json"]
    assert "system/rss_bytes" in sent
    assert sent[-2:] == ["result.json", "FINISHED"]
    assert json.loads((job.parent / "run" / "result.json").read_text())["steps"] == 1
    assert read_metrics(job.parent / "run" / "metrics.jsonl") == []
