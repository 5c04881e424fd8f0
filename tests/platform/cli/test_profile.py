import json
from pathlib import Path

import pytest

from lazytrain.platform.cli.app import run
from lazytrain.schedulers.hardware import hardware


def test_a_profile_that_plan_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAZYTRAIN_HOME", str(tmp_path))
    out = tmp_path / "node.json"
    given = ["--emulate", "RTX3090", "--nvme-dir", "/no/such/directory", "--out", str(out)]
    assert run(["profile", "--json", *given]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["nvme"] == {"path": "/no/such/directory", "available": False, "reason": "unavailable (missing)"}
    assert answer["host_memory"]["limit_bytes"] > 0
    read = hardware(str(out))
    assert read.model_dump(mode="json") == answer["profile"]
    assert read.device == "emulated"
    assert read.gpu_memory_bytes == hardware("RTX3090").gpu_memory_bytes


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lazytrain.platform.probe.measure", None)
    assert run(["profile", "--json", "--out", str(tmp_path / "none" / "node.json")]) == 2
    assert "its folder does not exist" in json.loads(capsys.readouterr().out)["error"]["message"]
