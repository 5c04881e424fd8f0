"""Whole runs of a tiny model: they learn, they stop and go on, and they say what is wrong with what they are given."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lazytrain.jobs.checkpoint import CheckpointStore
from lazytrain.jobs.errors import CheckpointError, DataError, InputError, ModelError
from lazytrain.jobs.executor import Emulated
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.tracking import read_metrics
from lazytrain.jobs.train import train

SHARED = Path(__file__).parents[3].parent / "shared" / "data"


def weights(job: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(job.parent / "run" / "model").state_dict()


def test_a_run_learns_and_leaves_a_complete_directory(job):
    seen = []
    result = train(load_spec(job, ["train.epochs=6"]), device="cpu", progress=seen.append)
    run = job.parent / "run"
    metrics = [m for m in read_metrics(run / "metrics.jsonl") if "loss" in m]
    assert result.status == "done"
    assert result.steps == len(metrics) == 60
    assert metrics[-1]["loss"] < 0.6 * metrics[0]["loss"]
    assert result.exact_match is not None and 0 <= result.exact_match_before <= 1
    assert {"job.yaml", "policy.json", "metrics.jsonl", "checkpoints", "verdicts.jsonl", "model", "result.json"} <= {
        path.name for path in run.iterdir()
    }
    wanted = {"learning_rate", "grad_norm", "clip_scale", "tokens_per_s", "supervised_tokens_per_s", "tflops_6n"}
    wanted |= {"step_s", "gpu_bytes", "host_bytes", *(f"stall_{link}_s" for link in ("h2d", "d2h", "nvme", "cpu"))}
    assert wanted <= metrics[0].keys()
    assert json.loads((run / "result.json").read_text())["exact_match"] == result.exact_match
    assert [m["step"] for m in seen if "loss" in m] == list(range(1, 61))


def test_the_saved_model_is_the_trained_one(job):
    train(load_spec(job), device="cpu")
    checkpoint = CheckpointStore(job.parent / "run" / "checkpoints").latest()
    saved = weights(job)
    layer = checkpoint.unit("model.layers.0")
    assert torch.equal(layer["master"][: 32 * 32].view(32, 32), saved["model.layers.0.self_attn.q_proj.weight"])


def test_rows_longer_than_the_model_is_for_are_noted(job):
    config = job.parent / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 10}))
    (note,) = train(load_spec(job, ["train.max_steps=1", "evaluate.limit=1"]), device="cpu").notes
    assert "tokens are longer than the 10 that the model is for" in note


def test_devices_and_micro_batches_do_not_change_what_is_learned(job):
    plain = train(load_spec(job, ["output.dir=a"]), device="cpu")
    emulated = train(load_spec(job, ["output.dir=b"]), device=Emulated(memory_bytes=1 << 28, h2d_bytes_s=1e9))
    assert emulated.loss == plain.loss


@pytest.mark.parametrize(
    ("optimizer", "micro_batch", "schedule"), [("hybrid8bit", 8, "linear"), ("adamw", 3, "constant")]
)
def test_stopping_saves_and_the_next_run_goes_on_to_the_same_weights(job, optimizer, micro_batch, schedule):
    changes = [f"optimizer.name={optimizer}", f"train.schedule={schedule}", "train.warmup=5", "train.max_steps=12"]
    spec = load_spec(job, changes)
    policy = policy_of(job, micro_batch)
    train(load_spec(job, [*changes, "output.dir=whole"]), device="cpu", policy=policy)
    steps = []
    stopped = train(spec, device="cpu", policy=policy, progress=steps.append, stop=lambda: len(steps) > 6)
    assert stopped.status == "stopped" and 0 < stopped.steps < 12
    assert not (job.parent / "run" / "result.json").exists()
    resumed = train(spec, device="cpu", policy=policy)
    assert resumed.status == "done" and resumed.steps == 12
    assert resumed.exact_match_before == stopped.exact_match_before
    whole = AutoModelForCausalLM.from_pretrained(job.parent / "whole" / "model").state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(job).items())
    rates = [
        [(m["step"], m["learning_rate"]) for m in read_metrics(job.parent / run / "metrics.jsonl") if "loss" in m]
        for run in ("run", "whole")
    ]
    assert rates[0] == rates[1] and [step for step, _ in rates[0]] == list(range(1, 13))


def policy_of(job, micro_batch):
    model = AutoModelForCausalLM.from_pretrained(job.parent / "model")
    facts = model_facts(model, micro_batch=micro_batch, sequence_length=16, dtype="float32")
    return Policy.from_homes(facts, ["host", "recompute", "gpu", "gpu"], accumulation=-(-8 // micro_batch))


def test_a_resume_without_the_optimizer_state_would_be_noticed(job):
    """The negative of the tests above: they can fail."""
    train(load_spec(job, ["output.dir=whole"]), device="cpu")
    steps = []
    train(load_spec(job), device="cpu", progress=steps.append, stop=lambda: len(steps) > 6)
    store = CheckpointStore(job.parent / "run" / "checkpoints")
    checkpoint = store.latest()
    blank = [
        (name, {k: t if k in ("master", "format") else torch.zeros_like(t) for k, t in checkpoint.unit(name).items()})
        for name in checkpoint.units
    ]
    store.save(checkpoint.step, blank, checkpoint.trainer)
    train(load_spec(job), device="cpu")
    whole = AutoModelForCausalLM.from_pretrained(job.parent / "whole" / "model").state_dict()
    assert not all(torch.equal(tensor, whole[name]) for name, tensor in weights(job).items())


def test_a_finished_run_is_not_trained_again(job):
    spec = load_spec(job)
    first = train(spec, device="cpu")
    again = []
    second = train(spec, device="cpu", progress=again.append)
    assert (second.steps, second.exact_match) == (first.steps, first.exact_match)
    assert not any("loss" in m for m in again)


def test_a_directory_of_another_job_is_refused(job):
    train(load_spec(job), device="cpu")
    with pytest.raises(CheckpointError, match="train differ"):
        train(load_spec(job, ["train.learning_rate=1e-4"]), device="cpu")


def test_a_directory_in_use_is_refused(job):
    spec = load_spec(job)

    def second(metrics):
        with pytest.raises(InputError, match="another process"):
            train(spec, device="cpu")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(spec, device="cpu", progress=second)


def test_a_step_with_fewer_rows_counts_every_token_once(job):
    """80 rows, steps of 12, micro-batches of 12 against 5: the last step has 8 rows, its last micro-batch 3."""
    one = train(load_spec(job, ["train.batch=12", "output.dir=one"]), device="cpu")
    five = train(load_spec(job, ["train.batch=12", "output.dir=five"]), policy=policy_of(job, 5), device="cpu")
    assert five.steps == one.steps == 14
    assert five.loss == pytest.approx(one.loss, rel=2e-3)  # 8-bit codes amplify the rounding of the sums


@pytest.mark.parametrize(
    "change, error, why",
    [
        (["model.path=nowhere"], ModelError, "nowhere"),
        (["data.train=[{path: nothing.jsonl}]"], DataError, "nothing.jsonl"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_written(job, change, error, why):
    with pytest.raises(error, match=why):
        train(load_spec(job, change), device="cpu")
    assert not (job.parent / "run" / "checkpoints").exists()


@pytest.mark.parametrize("problem", ["misses", "has unexpected"])
def test_weights_that_do_not_fit_the_configuration_are_named(job, problem):
    file = job.parent / "model" / "model.safetensors"
    tensors, name = load_file(file), "model.layers.2.mlp.up_proj.weight"
    if problem == "misses":
        del tensors[name]
    else:
        name = "model.layers.9.mlp.up_proj.weight"
        tensors[name] = torch.zeros(2, 2)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"{problem} weights: {name}"):
        train(load_spec(job), device="cpu")


def test_a_tokenizer_larger_than_the_embedding_is_refused(job, rewrite_model):
    rewrite_model(job.parent / "model", vocabulary=17)
    with pytest.raises(ModelError, match="has the id 18, the model's embedding only 17 rows"):
        train(load_spec(job), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["gsm8k-train.jsonl", "alpaca_en_demo.json"])
def test_real_files_train_and_the_loss_falls(file, job):
    from lazytrain.platform.demo.inputs import write_inputs

    if not (SHARED / file).exists():
        pytest.skip("the shared data is not here")
    write_inputs(job.parent / "demo", 0)
    repeat = 1 if file.startswith("gsm8k") else 10
    spec = load_spec(
        job,
        [
            f"model.path={job.parent / 'demo' / 'model'}", f"data.train=[{{path: {SHARED / file}}}]",
            "data.max_length=128", f"train.epochs={repeat}", "train.max_steps=30", "train.learning_rate=2e-3",
            "train.batch=4", "evaluate.limit=1", "evaluate.max_new_tokens=4", "evaluate.every=1",
        ],
    )  # fmt: skip
    result = train(spec, device="cpu")
    losses = [m["loss"] for m in read_metrics(job.parent / "run" / "metrics.jsonl") if "loss" in m]
    assert len(losses) == result.steps > 10
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_packing_changes_the_sequences_and_not_what_is_learned(job):
    """Every step takes all rows; one of them is long, so that padding to it wastes most of a batch."""
    rows = [{"query": f"add {a} and {b}", "response": f"The answer is : {a + b}"} for a in range(10) for b in range(6)]
    rows.append({"query": "add 1 and 1 " * 4, "response": "The answer is : 2"})
    (job.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses, memory = {}, {}
    for packing in ("required", "false"):
        changes = [f"data.packing={packing}", "data.split={train: 1.0}", "train.batch=61", "train.epochs=4"]
        spec = load_spec(job, [f"output.dir={job.parent / packing}", *changes])
        result = train(spec, device=Emulated(memory_bytes=1 << 28, h2d_bytes_s=1e9))
        metrics = [m for m in read_metrics(job.parent / packing / "metrics.jsonl") if "loss" in m]
        losses[packing], memory[packing] = [m["loss"] for m in metrics], result.peak_gpu_bytes
    assert losses["required"] == pytest.approx(losses["false"], rel=1e-5)
    assert losses["required"][0] == pytest.approx(losses["false"][0], rel=1e-6)
    assert memory["required"] < memory["false"]


def test_packing_is_refused_where_rows_would_see_each_other(job, monkeypatch):
    monkeypatch.setattr("lazytrain.jobs.train.setup.packing_problem", lambda _: "a running state")
    with pytest.raises(InputError, match="cannot be packed: a running state"):
        train(load_spec(job, ["data.packing=required"]), device="cpu")
    assert train(load_spec(job, ["train.max_steps=1", "data.split={train: 1.0}"]), device="cpu").status == "done"


def test_training_ends_when_it_stops_learning(job):
    """At a learning rate that undoes what is learned, the evaluation loss soon stops falling."""
    spec = load_spec(job, ["train.patience=2", "train.epochs=30", "train.learning_rate=1", "evaluate.limit=1"])
    result = train(spec, device="cpu")
    losses = [m["eval_loss"] for m in read_metrics(job.parent / "run" / "metrics.jsonl") if "eval_loss" in m]
    assert result.status == "done" and result.steps < 300
    assert min(losses[-2:]) >= min(losses[:-2])
    for stop in range(3, len(losses)):
        assert min(losses[stop - 2 : stop]) < min(losses[: stop - 2])


def test_a_time_limit_stops_the_run_and_more_time_ends_it(job, monkeypatch):
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr("lazytrain.jobs.train.loop.time.monotonic", lambda: float(next(clock)))
    limited = load_spec(job, ["queue.max_duration=100s"])
    stopped = train(limited, device="cpu")
    assert stopped.status == "stopped" and 0 < stopped.steps < 20
    again = train(limited, device="cpu")
    assert again.status == "stopped" and again.steps == stopped.steps + 1, "time before the stop counts"
    assert train(load_spec(job), device="cpu").status == "done"
