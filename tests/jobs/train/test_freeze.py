"""Runs that freeze part of the model: they learn what plain PyTorch learns, go on bit for bit, and export all of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lazytrain.jobs.checkpoint import CheckpointStore
from lazytrain.jobs.errors import CheckpointError, ModelError, SpecError
from lazytrain.jobs.executor import Emulated
from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.tracking import read_metrics
from lazytrain.jobs.train import export_run, loop, train

FROZEN = ["*embed_tokens", "model.layers.0", "model.layers.1.mlp.up_proj"]
"""The embedding, which is the head too; a layer; a matrix of another layer."""
FREEZE = f"train.freeze=[{', '.join(repr(name) for name in FROZEN)}]"
SHORT = [FREEZE, "data.split={train: 1.0}", "train.max_steps=8", "output.save_every=2", "train.warmup=0"]
PLAIN = ["optimizer.name=adamw", "train.schedule=constant", "train.weight_decay=0.1"]
GPU = Emulated(memory_bytes=1 << 28, h2d_bytes_s=1e9)


def is_frozen(name: str) -> bool:
    return name.startswith(("model.embed_tokens", "lm_head", "model.layers.0.", "model.layers.1.mlp.up_proj"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def plain(job: Path, batches: list) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of torch's AdamW on the same batches."""
    model = AutoModelForCausalLM.from_pretrained(job.parent / "model").train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for p in learning.values() if p.dim() > 1]
    groups = [{"params": decayed}, {"params": [p for p in learning.values() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)
    found = []
    for batch in batches:
        loss = model(**batch.inputs(), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, {name: p.detach() for name, p in model.named_parameters()}


def test_it_learns_what_plain_torch_learns_and_leaves_the_rest_alone(job: Path, monkeypatch) -> None:
    batches, original = [], loop.collate
    monkeypatch.setattr(loop, "collate", lambda *a, **k: batches.append(original(*a, **k)) or batches[-1])
    train(load_spec(job, [*SHORT, *PLAIN]), device=GPU)
    wanted, plainly = plain(job, batches)
    assert losses(job.parent / "run") == pytest.approx(wanted, rel=1e-5)
    assert wanted[-1] < wanted[0]
    got, before = weights(job.parent / "run" / "model"), weights(job.parent / "model")
    assert got.keys() == plainly.keys()
    for name, tensor in plainly.items():
        assert torch.allclose(got[name], tensor, rtol=1e-3, atol=1e-6), name
        assert torch.equal(got[name], before[name]) == is_frozen(name), name


def test_frozen_weights_have_no_state_and_lie_beside_the_checkpoints_once(job: Path) -> None:
    short = [*SHORT, "train.max_steps=1"]
    frozen = train(load_spec(job, short), device="cpu")
    full = train(load_spec(job, [*short, "train.freeze=[]", "output.dir=full"]), device="cpu")
    run = job.parent / "run"
    less = [CheckpointStore(folder / "checkpoints").latest() for folder in (run, job.parent / "full")]
    share = 1 - sum(t.numel() for n, t in load_file(run / "frozen.safetensors").items()) / full_size(job)
    assert share < 0.7
    assert less[0].bytes < (share + 0.1) * less[1].bytes
    assert "model.layers.0" not in less[0].units and "model.layers.0" in less[1].units
    assert all(is_frozen(name) for name in load_file(run / "frozen.safetensors"))
    assert frozen.host_bytes < full.host_bytes
    assert not (job.parent / "full" / "frozen.safetensors").exists()


def full_size(job: Path) -> int:
    return sum(tensor.numel() for tensor in weights(job.parent / "model").values())


@pytest.fixture(scope="module")
def stopped(undisturbed: Path) -> Path:
    """A run that was stopped after a few steps, whose model is gone and whose folder was moved; beside a whole one."""
    train(load_spec(undisturbed, [*SHORT, "output.dir=whole"]), device="cpu")
    steps: list[object] = []
    train(load_spec(undisturbed, SHORT), device="cpu", progress=steps.append, stop=lambda: len(steps) > 4)
    (undisturbed.parent / "model" / "model.safetensors").unlink()
    (undisturbed.parent / "run").rename(undisturbed.parent / "moved")
    return undisturbed


@pytest.mark.parametrize("device", ["cpu", GPU], ids=["cpu", "emulated"])
def test_going_on_needs_nothing_but_the_run(stopped: Path, device: str | Emulated, tmp_path: Path) -> None:
    shutil.copytree(stopped.parent / "moved", tmp_path / "run")
    done = train(load_spec(stopped, [*SHORT, f"output.dir={tmp_path / 'run'}"]), device=device)
    assert done.status == "done" and len(losses(tmp_path / "run")) == 8
    got, wanted = weights(tmp_path / "run" / "model"), weights(stopped.parent / "whole" / "model")
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
    export_run(tmp_path / "run", tmp_path / "out")
    exported = weights(tmp_path / "out")
    assert all(torch.equal(exported[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("change", ["altered", "missing"])
def test_other_frozen_weights_are_refused(stopped: Path, tmp_path: Path, change: str) -> None:
    shutil.copytree(stopped.parent / "moved", tmp_path / "run")
    file = tmp_path / "run" / "frozen.safetensors"
    tensors = load_file(file)
    file.unlink()
    if change == "altered":
        save_file({name: tensor * 1.001 for name, tensor in tensors.items()}, file)
    with pytest.raises(CheckpointError, match=rf"frozen\.safetensors.*{change}"):
        train(load_spec(stopped, [*SHORT, f"output.dir={tmp_path / 'run'}"]), device="cpu")
    with pytest.raises(CheckpointError, match=change):
        export_run(tmp_path / "run", tmp_path / "out")


def test_freezing_other_parts_is_another_run(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped.parent / "moved", tmp_path / "run")
    with pytest.raises(CheckpointError, match="train differ"):
        train(load_spec(stopped, [*SHORT, "train.freeze=[model.norm]", f"output.dir={tmp_path / 'run'}"]), device="cpu")


@pytest.mark.parametrize(
    ("settings", "error", "why"),
    [
        (["train.freeze=[nothing]"], ModelError, "no parameter or module 'nothing'"),
        (["train.freeze=['*']"], ModelError, "leaves no parameter"),
        (["train.freeze=[model.norm]", "lora={rank: 2}"], SpecError, "remove train.freeze or lora"),
        (["train.freeze=model.norm"], SpecError, "train.freeze"),
    ],
)
def test_what_cannot_be_meant_is_refused(job: Path, settings: list[str], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        train(load_spec(job, settings), device="cpu")
    assert not (job.parent / "run" / "checkpoints").exists()
