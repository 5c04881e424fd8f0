"""Models of different kinds, written unit by unit, are what `from_pretrained` makes of the folder: the same logits."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from lazytrain.jobs.checkpoint import export_folder, export_weights
from lazytrain.jobs.errors import CheckpointError
from lazytrain.jobs.executor import stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.model import describe_model
from lazytrain.jobs.policy import Policy

families = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "families.py")))


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


@pytest.mark.parametrize(
    "architecture",
    ["gpt2", "bloom", "gemma3_text", "gpt_oss", "qwen3_5_text", "qwen3_moe", "mixtral", "phi3", "mamba"],
)
def test_what_is_exported_has_the_logits_of_the_model(architecture: str, tmp_path: Path) -> None:
    model = families.small_model(architecture).eval()
    ids = torch.arange(2, 10)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    facts = model_facts(model, micro_batch=1, sequence_length=8, dtype="float32")
    policy = Policy.from_homes(facts, [*("host" for _ in facts.layers), "gpu"])
    with stream(model, policy, device="cpu", facts=facts) as streamed, export_weights(tmp_path / "out") as writer:
        describe_model(model, NoTokenizer(), writer.folder)
        for _, weights in streamed.named_weights():
            writer.add(model, weights)
        writer.add(model, streamed.rest())
    again, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=ids).logits, wanted)


def put(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "weights").write_text(content)
    return folder


def beside(folder: Path) -> dict[str, str]:
    return {path.name: (path / "weights").read_text() for path in folder.parent.iterdir()}


@pytest.fixture
def dead() -> int:
    """Number of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    return ended.pid


@pytest.mark.parametrize("own", [True, False], ids=["same number", "other number"])
def test_what_a_killed_export_left_is_removed(own: bool, dead: int, tmp_path: Path) -> None:
    """Also in a container, where the process that goes on has the number of the one that was killed."""
    folder, pid = put(tmp_path / "m[0]", "whole"), os.getpid() if own else dead
    put(tmp_path / f".m[0].{pid}", "half")
    put(tmp_path / f".m[0].{pid}.old", "before")
    put(tmp_path / f".m[0].{os.getppid()}", "of a process that lives")
    put(tmp_path / ".m[0].notes", "a person's")
    with export_folder(folder) as temporary:
        (temporary / "weights").write_text("new")
    kept = {f".m[0].{os.getppid()}": "of a process that lives", ".m[0].notes": "a person's"}
    assert beside(folder) == {"m[0]": "new", **kept}


def test_a_folder_that_a_killed_export_had_moved_away_comes_back(dead: int, tmp_path: Path) -> None:
    put(tmp_path / f".model.{dead}.old", "before")
    with pytest.raises(CheckpointError), export_folder(tmp_path / "model"):
        raise OSError("the disk is full")
    assert beside(tmp_path / "model") == {"model": "before"}


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rename = put(tmp_path / "model", "before"), Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == f".model.{os.getpid()}":
            raise OSError("stale file handle")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="stale"), export_folder(folder) as temporary:
        (temporary / "weights").write_text("new")
    assert beside(folder) == {"model": "before"}
