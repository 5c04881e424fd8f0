import json
from pathlib import Path

import pytest

from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.train import train
from lazytrain.platform.cli.app import run


def test_exports_a_run(tiny_job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(load_spec(tiny_job, ["train.max_steps=2", "train.batch=4", "evaluate.limit=1"]), device="cpu")
    out = tmp_path / "out"
    assert run(["export", result.run_dir, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) | {"eval_loss": None} == {"out": str(out), "step": 2, "eval_loss": None}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    assert run(["export", result.run_dir, "--out", str(tmp_path / "b"), "--checkpoint", "9"]) == 2
    assert "steps 2" in capsys.readouterr().err
