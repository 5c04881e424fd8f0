"""The demo as a person runs it: real Ray, real probes, real training. Minutes long, so CI runs it once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_demo(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    command = [sys.executable, "-c", "from lazytrain.platform.cli import main; main()", "demo", "--json"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        env={**environment, "LAZYTRAIN_HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    assert answer["exact_match_before"] < 0.10
    assert answer["exact_match"] >= 0.90
    assert answer["peak_device_bytes"] <= answer["device_budget_bytes"] < answer["plain_training_bytes"]
    assert answer["boundaries"]["gpu"] > 0
    assert answer["boundaries"]["host"] > 0
    assert 0.5 < answer["predicted_step_s"] / answer["measured_step_s"] < 2
    assert "Traceback" not in done.stderr
