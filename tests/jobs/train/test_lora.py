"""Runs that train adapters: they learn what plain peft learns, go on bit for bit, and leave what peft loads."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lazytrain.jobs.checkpoint import CheckpointStore
from lazytrain.jobs.errors import CheckpointError, ModelError
from lazytrain.jobs.executor import Emulated
from lazytrain.jobs.spec import Model, load_spec
from lazytrain.jobs.tracking import read_metrics
from lazytrain.jobs.train import complete, evaluate_model, export_run, loop, train, trained_model

LORA = "lora={rank: 4, alpha: 8, target_modules: [q_proj, v_proj, down_proj]}"
SHORT = [LORA, "data.split={train: 1.0}", "train.max_steps=8", "output.save_every=2", "train.warmup=0"]
PLAIN = ["optimizer.name=adamw", "train.schedule=constant", "train.weight_decay=0.1"]
ADAPTERS = "adapter_model.safetensors"
KILLED = """
import json, os, signal, sys
from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.train import train

seen = []

def on_point(name):
    seen.append(name)
    if seen.count("backward") == 6:
        os.kill(os.getpid(), signal.SIGKILL)

train(load_spec(sys.argv[1], json.loads(sys.argv[2])), device="cpu", on_point=on_point)
"""


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / ADAPTERS)


def with_adapters(job: Path, folder: Path) -> peft.PeftModel:
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(job.parent / "model"), folder).eval()


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def plain_peft(job: Path, batches: list, seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and adapters of peft and torch's AdamW on the same batches."""
    model = AutoModelForCausalLM.from_pretrained(job.parent / "model")
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, config).train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=3e-3, weight_decay=0.1)
    found = []
    for batch in batches:
        loss = model(**batch.inputs(), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, peft.get_peft_model_state_dict(model)


def test_adapters_learn_what_plain_peft_learns(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, original = [], loop.collate
    monkeypatch.setattr(loop, "collate", lambda *a, **k: batches.append(original(*a, **k)) or batches[-1])
    spec = load_spec(job, [*SHORT, *PLAIN])
    result = train(spec, device=Emulated(memory_bytes=1 << 28, h2d_bytes_s=1e9))
    wanted, weights = plain_peft(job, batches, spec.train.seed)
    assert result.steps == len(wanted) == 8
    assert losses(job.parent / "run") == pytest.approx(wanted, rel=1e-5)
    assert wanted[-1] < wanted[0]
    got = adapters(job.parent / "run" / "model")
    assert got.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(got[name], tensor, rtol=1e-3, atol=1e-6), name


def test_peft_loads_what_a_run_and_export_leave(job: Path) -> None:
    train(load_spec(job, [*SHORT, "lora.target_modules=all-linear"]), device="cpu")
    run, out = job.parent / "run", job.parent / "out"
    exported = export_run(run, out)
    assert exported.step == 8
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(job.parent / "model")
    assert {path.name for path in out.iterdir() if path.suffix == ".safetensors"} == {ADAPTERS}
    assert len(adapters(out)) == 3 * 7 * 2
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        trained, again = (with_adapters(job, folder)(ids).logits for folder in (run / "model", out))
        base = AutoModelForCausalLM.from_pretrained(job.parent / "model").eval()(ids).logits
    assert torch.equal(trained, again) and not torch.allclose(trained, base, atol=1e-3)


def test_checkpoints_hold_only_what_learns(job: Path) -> None:
    train(load_spec(job, SHORT), device="cpu")
    checkpoint = CheckpointStore(job.parent / "run" / "checkpoints").latest()
    assert checkpoint is not None
    assert checkpoint.units == tuple(f"model.layers.{i}" for i in range(3))
    named = [name for unit in checkpoint.trainer["layouts"].values() for name, _, _ in unit]
    assert len(named) == 3 * 3 * 2 and all(".lora_" in name for name in named)
    assert checkpoint.bytes < (job.parent / "model" / "model.safetensors").stat().st_size / 3


def test_the_trained_adapters_are_evaluated_and_generate(job: Path) -> None:
    spec = load_spec(job, [LORA, "train.learning_rate=2e-2", "evaluate.limit=4", "evaluate.every=1"])
    result = train(spec, device="cpu")
    folder = trained_model(job.parent / "run")
    found = evaluate_model(spec, model=folder, device="cpu", verdicts=job.parent / "verdicts.jsonl")
    assert found.exact_match == result.exact_match
    assert (job.parent / "verdicts.jsonl").read_text() == (job.parent / "run" / "verdicts.jsonl").read_text()
    row = json.loads((job.parent / "verdicts.jsonl").read_text().splitlines()[0])
    section = Model(path=folder, dtype="float32")
    written, base = (
        complete(s, [row["prompt"]], device="cpu", max_new_tokens=8, template=False)
        for s in (section, section.model_copy(update={"path": str(job.parent / "model")}))
    )
    assert written == [row["output"]] != base


def test_a_killed_run_goes_on_to_the_same_bits(job: Path) -> None:
    settings = [*SHORT, "lora.dropout=0.2"]
    train(load_spec(job, [*settings, "output.dir=whole"]), device="cpu")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(job), json.dumps(settings)], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert CheckpointStore(job.parent / "run" / "checkpoints").latest() is not None
    done = train(load_spec(job, settings), device="cpu")
    assert done.status == "done" and len(losses(job.parent / "run")) == 8
    got, wanted = adapters(job.parent / "run" / "model"), adapters(job.parent / "whole" / "model")
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


@pytest.fixture(scope="module")
def stopped(undisturbed: Path) -> Path:
    """A run with adapters that was stopped after a few steps."""
    steps: list[object] = []
    train(load_spec(undisturbed, SHORT), device="cpu", progress=steps.append, stop=lambda: len(steps) > 4)
    return undisturbed


def test_going_on_needs_the_weights_that_the_run_began_with(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped.parent, tmp_path, dirs_exist_ok=True)
    spec = load_spec(stopped, SHORT)
    file = stopped.parent / "model" / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, name: weights[name] * 1.001}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="not those that the adapters") as raised:
        train(spec, device="cpu")
    assert str(stopped.parent / "model") in raised.value.hint
    file.unlink()
    with pytest.raises(CheckpointError, match=r"hold adapters alone, and cannot load the model"):
        train(spec, device="cpu")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="lora differ"):
        train(load_spec(stopped, [*SHORT, "lora.rank=8"]), device="cpu")
    assert train(spec, device="cpu").status == "done"


def test_the_reference_of_preferences_is_the_model_without_adapters(job: Path) -> None:
    rows = [
        {"prompt": f"add {a} and {b}", "chosen": f"The answer is : {a + b}", "rejected": f"The answer is : {a + b + 1}"}
        for a in range(4) for b in range(5)
    ]  # fmt: skip
    (job.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    preferences = ["train.objective=dpo", "train.max_steps=2", "train.weight_decay=0"]
    for lora, folder in ((LORA, "lora"), ("lora=null", "full")):
        train(load_spec(job, [lora, *preferences, f"output.dir={folder}"]), device="cpu")
    references = [load_file(job.parent / folder / "reference.safetensors") for folder in ("full", "lora")]
    assert all(torch.equal(references[0][part], references[1][part]) for part in references[0])
    assert losses(job.parent / "lora")[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses(job.parent / "lora")[1] != losses(job.parent / "lora")[0]


def test_unknown_target_modules_are_named_with_the_nearest(job: Path) -> None:
    with pytest.raises(ModelError, match="no module 'qproj'") as raised:
        train(load_spec(job, ["lora={target_modules: [v_proj, qproj]}"]), device="cpu")
    assert "did you mean q_proj" in raised.value.hint
    assert not (job.parent / "run" / "checkpoints").exists()
