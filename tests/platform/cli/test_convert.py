"""``lazytrain convert``: what is printed, written and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lazytrain.platform.cli.app import run

FILE = Path(__file__).parents[1] / "convert" / "files" / "megatrain_14b.yaml"


def test_the_job_goes_to_stdout_and_the_notes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(FILE)]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["model"]["path"] == "Qwen/Qwen2.5-14B-Instruct"
    assert f"{FILE}:30: memory.checkpoint_interval: what is kept" in err


def test_json_and_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "job.yaml"
    assert run(["convert", str(FILE), "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["source"], answer["out"]) == ("MegaTrain", str(out))
    assert yaml.safe_load(out.read_text(encoding="utf-8")) == answer["job"]
    assert {"key", "line", "value", "why"} == set(answer["notes"][0])
    assert run(["convert", str(FILE), "--out", str(out)]) == 2, "a file that is there is never replaced"
    assert "exists already" in capsys.readouterr().err


def test_another_file_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "compose.yaml"
    other.write_text("services: {}\n", encoding="utf-8")
    assert run(["convert", str(other)]) == 2
    assert "no file of LLaMA-Factory, Axolotl or MegaTrain" in capsys.readouterr().err
