from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lazytrain.jobs.errors import DataError, LazytrainError
from lazytrain.jobs.run_directory import RunDirectory
from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.tracking import read_metrics
from lazytrain.jobs.train import lost, reconcile, train

SHORT = ["data.split={train: 1.0}", "train.max_steps=2"]
KILLED = """
import os, signal, sys
from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.train import train

train(load_spec(sys.argv[1]), device="cpu", on_point=lambda name: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.fixture(scope="module")
def killed(undisturbed: Path) -> Path:
    """The directory of a run whose process was killed."""
    ended = subprocess.run([sys.executable, "-c", KILLED, str(undisturbed)], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    return undisturbed.parent / "run"


def test_every_ending_is_in_the_directory(job: Path) -> None:
    run = RunDirectory(job.parent / "run")
    assert run.status() is None
    seen, spec = [], load_spec(job, SHORT)
    train(spec, device="cpu", stop=lambda: True, on_point=lambda name: seen.append(run.status()))
    assert {status.state for status in seen} == {"running"} and seen[0].pid == os.getpid()
    assert (run.status().state, run.status().attempt) == ("stopped", 1)

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(spec, device="cpu", on_point=interrupt)
    assert (run.status().state, run.status().attempt) == ("stopped", 2)
    rows = (job.parent / "rows.jsonl").read_text()
    (job.parent / "rows.jsonl").write_text("")
    with pytest.raises(DataError):
        train(spec, device="cpu")
    assert run.status().state == "failed" and "rows.jsonl" in run.status().error
    (job.parent / "rows.jsonl").write_text(rows)
    train(spec, device="cpu")
    ended = run.status()
    assert (ended.state, ended.attempt, ended.error) == ("done", 4, "") and ended.ended >= ended.started


def test_a_killed_run_is_lost_at_once_and_for_good(killed: Path, tmp_path: Path) -> None:
    run = shutil.copytree(killed, tmp_path / "run")
    assert json.loads((run / "status.json").read_text())["state"] == "running"
    assert RunDirectory(run).status().state == "lost"
    assert reconcile(run)
    assert json.loads((run / "status.json").read_text())["state"] == "lost"
    assert not reconcile(run), "once is enough"


def test_the_next_run_beside_it_puts_the_status_of_a_lost_one_right(killed: Path, job: Path, monkeypatch) -> None:
    """That of another machine, or of a service, is left alone, and a tracking server that is down disturbs nobody."""
    for name in ("one", "two", "other machine", "of a service"):
        shutil.copytree(killed, job.parent / name)
    (job.parent / "of a service" / ".owner").write_text("{}")
    status = job.parent / "other machine" / "status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "host": "elsewhere"}))
    threads, original = [], lost.reconcile_beside
    monkeypatch.setattr("lazytrain.jobs.train.run.reconcile_beside", lambda d: threads.append(original(d)))
    asked = []

    def end_lost_run(path: Path) -> bool:
        asked.append(path.name)
        raise LazytrainError("MLflow does not answer")

    monkeypatch.setattr(lost, "end_lost_run", end_lost_run)
    assert train(load_spec(job, SHORT), device="cpu").status == "done"
    threads[0].join(60)
    states = {name: json.loads((job.parent / name / "status.json").read_text())["state"] for name in ("one", "two")}
    assert states == {"one": "lost", "two": "lost"} and asked == ["one", "two"]
    assert json.loads(status.read_text())["state"] == "running"
    assert json.loads((job.parent / "of a service" / "status.json").read_text())["state"] == "running"
    assert RunDirectory(job.parent / "run").status().state == "done"


def test_a_lost_run_that_goes_on_counts_its_attempts(killed: Path, job: Path) -> None:
    shutil.copytree(killed, job.parent / "run")
    train(load_spec(job, SHORT), device="cpu")
    assert RunDirectory(job.parent / "run").status().attempt == 2


def test_a_run_that_is_under_way_is_not_lost(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`end_lost_run` itself is tested with MLflow, beside the tracker."""
    run, asked = job.parent / "run", []
    monkeypatch.setattr("lazytrain.jobs.train.lost.end_lost_run", lambda path: asked.append(path) or True)
    spec = load_spec(job, SHORT)
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
