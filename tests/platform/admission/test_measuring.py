"""Who measures model and rows: this process, a node of the cluster, or nobody, who says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from lazytrain.jobs.spec import load_spec
from lazytrain.platform.admission.measuring import Here, RowFigures, installed


def test_rows_and_facts_of_a_job_and_what_is_kept(tiny_job: Path, tmp_path: Path) -> None:
    spec, here = load_spec(tiny_job), Here(tmp_path / "facts")
    rows = here.rows(spec, str(tmp_path / "rows"))
    assert rows == RowFigures(train=240, longest=rows.longest, refused=0)
    facts = here.facts(spec, batch=2, length=rows.longest, dtype="float32")
    assert (facts.micro_batch, facts.sequence_length) == (2, rows.longest)
    assert len(list((tmp_path / "facts").iterdir())) == 1
    named = Here(tmp_path / "facts").facts(spec.model.path, batch=2, length=rows.longest, dtype="float32")
    assert named == facts
    assert len(list((tmp_path / "facts").iterdir())) == 1


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers")))
from lazytrain.platform.cli import main
main()
"""


def test_without_torch_and_without_a_cluster_a_plan_says_what_to_do(tmp_path: Path) -> None:
    asked = ["plan", "--model", "qwen2.5-3b", "--gpu", "H800", "--batch", "2", "--length", "64", "--json"]
    environment = {"LAZYTRAIN_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", WITHOUT, *asked], capture_output=True, text=True, env=environment)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (2, "invalid_input")
    assert "LAZYTRAIN_RAY_ADDRESS" in error["hint"]
    trained = subprocess.run(
        [sys.executable, "-c", WITHOUT, "evaluate", str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert trained.returncode == 2
    assert "this needs torch, which is not installed here" in trained.stderr


def test_what_is_installed() -> None:
    assert installed("torch")
    assert not installed("no_such_package")
