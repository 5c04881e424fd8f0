"""The demo as a person runs it: real Ray, real probes, real training. Minutes long, so CI runs it once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def start(tmp_path: Path) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    command = [sys.executable, "-c", "from lazytrain.platform.cli import main; main()", "demo", "--json"]
    return subprocess.Popen(
        [*command, "--dir", str(tmp_path / "demo")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "LAZYTRAIN_HOME": str(tmp_path / "home")},
    )


@pytest.mark.timeout(900)
def test_demo(tmp_path: Path) -> None:
    process = start(tmp_path)
    out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    answer = json.loads(out)
    assert answer["exact_match_before"] < 0.10
    assert answer["exact_match"] >= 0.90
    assert answer["peak_device_bytes"] <= answer["device_budget_bytes"] < answer["plain_training_bytes"]
    assert all(answer["boundaries"][home] > 0 for home in ("gpu", "host", "nvme", "recompute"))
    assert answer["predicted_step_s"] > 0
    assert answer["measured_step_s"] > 0
    assert "Traceback" not in err


@pytest.mark.timeout(300)
def test_ctrl_c_leaves_nothing_running(tmp_path: Path) -> None:
    """While a probe runs: Ray, its workers and the probe are there."""
    process = start(tmp_path)
    searching = tmp_path / "demo" / "run-001" / "tune"
    deadline = time.monotonic() + 200
    while not searching.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)  # a spinning test would take one of two cores from what it waits for
    started = psutil.Process(process.pid).children(recursive=True)
    assert any(child.name() == "raylet" for child in started)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err[-3000:]
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []
