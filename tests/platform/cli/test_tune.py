"""``lazytrain tune``, as a person runs it: a local Ray, and a probe that really trains."""

import json
from pathlib import Path

import pytest

from lazytrain.platform.cli.app import run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("quick")]


def test_the_best_batch_is_one_that_was_tried(
    tiny_job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAZYTRAIN_RAY_AUTH", "disabled")
    monkeypatch.setenv("LAZYTRAIN_PROBE_S", "0.2")
    rules = ["--set", "plan.nvme=null", "--set", "plan.planner=every_layer"]
    limits = ["--high", "2", "--most-probes", "1"]
    assert run(["tune", str(tiny_job), *rules, "--device", "emulated:RTX3090", *limits, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (trial,) = answer["trials"]
    assert trial["batch"] == answer["batch"]
    assert answer["objective"] == "throughput"
