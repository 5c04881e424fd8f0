"""The whole service, as people start it: real Ray, real training, a controller that is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from lazytrain.jobs.spec import load_spec
from lazytrain.platform.artifacts import JobFiles, read_json
from lazytrain.platform.client import Client
from lazytrain.platform.supervisor import Place

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RULES = ("train.batch=4", "plan.planner=every_layer", "plan.nvme=null", "evaluate.limit=2", "output.save_every=5")


def run(*arguments: str, environment: dict[str, str], expect: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-c", "from lazytrain.platform.cli import main; main()", *arguments, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == expect, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def wait_for(what: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def mlflow_statuses(uri: str) -> dict[str, str]:
    client = MlflowClient(uri)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return {run.data.tags["lazytrain.job_id"]: run.info.status for run in runs}


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"HOME": tmp_path / "home", "API_PORT": port, "ROOTS": tmp_path}
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}  # tokens, as for people
    made = {**inherited, **{f"LAZYTRAIN_{name}": str(value) for name, value in settings.items()}}
    yield made
    run("down", environment=made)


def test_two_good_jobs_one_impossible_one_bad_and_a_controller_killed(
    environment: dict[str, str], tiny_job: Path, tmp_path: Path
) -> None:
    place = Place(tmp_path / "home")
    up = run("up", "--emulate", "RTX3090", "--gpus", "2", "--cpus", "2", "--no-mlflow", environment=environment)
    client = Client(up["api"], Path(up["token_file"]).read_text())

    good = [client.submit(load_spec(tiny_job, (*RULES, f"train.max_steps={steps}"))).id for steps in (25, 6)]
    impossible = client.submit(load_spec(tiny_job, (*RULES, "plan.host_memory=1MB"))).id
    rows = tmp_path / "bad.jsonl"
    rows.write_text('{"nothing": 1}\n')
    bad = client.submit(load_spec(tiny_job, (*RULES, f"data.train.0.path={rows}"))).id

    wait_for(lambda: client.job(good[0]).state == "RUNNING")
    killed = place.process("controller")
    assert killed is not None
    os.kill(killed.pid, signal.SIGKILL)
    ended = {job_id: client.wait(job_id, timeout_s=150) for job_id in (*good, impossible, bad)}
    assert [ended[job_id].state for job_id in good] == ["SUCCEEDED", "SUCCEEDED"], ended
    assert (ended[impossible].state, ended[impossible].reason) == ("REJECTED", "does_not_fit")
    assert "host memory, has" in ended[impossible].sentence
    assert (ended[bad].state, ended[bad].reason) == ("REJECTED", "invalid_data")

    new = place.process("controller")
    assert new is not None
    assert new != killed
    for job_id, steps in zip(good, (25, 6), strict=True):
        assert ended[job_id].attempt == 1  # adopted, not started again
        assert [event.state for event in client.events(job_id)].count("SUCCEEDED") == 1
        assert [row["step"] for row in client.metrics(job_id) if "loss" in row] == list(range(1, steps + 1))
        assert ended[job_id].outcome["result"] == read_json(JobFiles(ended[job_id].run_dir).result)
    shown = run("show", good[0], environment=environment)
    assert shown["sentence"].startswith("done after 25 steps")
    assert run("ps", environment=environment) == {"jobs": []}
    expected = dict.fromkeys(good, "FINISHED") | dict.fromkeys((impossible, bad), "FAILED")
    wait_for(lambda: mlflow_statuses(up["mlflow"]) == expected)

    services = [place.process(name) for name in ("ray", "controller", "api", "supervisor")]
    assert None not in services
    assert run("down", environment=environment)["stopped"] == ["supervisor", "api", "controller", "ray"]
    assert not any(process.alive for process in services if process is not None)
