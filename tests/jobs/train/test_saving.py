"""Saving beside training: what is saved is the state after the step, whatever training does meanwhile."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lazytrain.jobs.checkpoint import CheckpointStore
from lazytrain.jobs.errors import CheckpointError, InputError
from lazytrain.jobs.executor import Emulated
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.train import export_run, train

GPU = Emulated(memory_bytes=1 << 28, h2d_bytes_s=1e9)
WITHOUT_EVALUATION = ["data.split={train: 1.0}", "train.epochs=1", "output.save_every=100"]


def states(run: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = next(c for c in CheckpointStore(run / "checkpoints").all() if c.step == step)
    return {f"{unit}/{name}": tensor for unit in checkpoint.units for name, tensor in checkpoint.unit(unit).items()}


@pytest.mark.parametrize(
    ("device", "parked"), [("cpu", []), (GPU, []), (GPU, [0, 2])], ids=["cpu", "emulated", "state-on-nvme"]
)
def test_a_slow_disk_saves_the_state_of_its_step_while_the_next_one_runs(
    job: Path, device: str | Emulated, parked: list[int]
) -> None:
    """The disk stands still in the middle of the save of step 5 until step 6 has run forward and backward."""
    settings = [*WITHOUT_EVALUATION, "train.max_steps=8", f"plan.nvme={job.parent}"]
    at_once = load_spec(job, [*settings, "output.dir=plain", "output.save_every=5"])
    train(at_once, device=device)
    policy = Policy.load(job.parent / "plain" / "policy.json").parked(optimizer=parked) if parked else None

    next_step, seen = threading.Event(), []

    def on_point(name: str) -> None:
        seen.append(name)
        if name == "start" and seen.count("stepped") == 5:
            assert next_step.wait(60)
        if name == "step" and seen.count("step") == 6:
            next_step.set()

    slow = load_spec(job, [*settings, "output.dir=slow", "output.save_every=5"])
    train(slow, device=device, on_point=on_point, policy=policy)
    during = seen[seen.index("start") : seen.index("unit model.embed_tokens")]
    assert {"backward", "step"} <= set(during), "training went on while the save stood still"
    for step in (5, 8):
        plain, saved = states(job.parent / "plain", step), states(job.parent / "slow", step)
        assert plain.keys() == saved.keys()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in plain.items())


def test_buffers_are_saved_as_they_were_after_the_step(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One counts the forwards in training mode; the disk stands still until the next step has run its own."""
    from lazytrain.jobs.train import setup

    load, seen, next_step = setup.load_model, [], threading.Event()

    def counting(section):
        model, tokenizer = load(section)
        model.model.norm.register_buffer("forwards", torch.zeros(()))
        model.model.norm.register_forward_pre_hook(count)
        return model, tokenizer

    def count(module, inputs) -> None:
        module.forwards += module.training

    def on_point(name: str) -> None:
        seen.append(name)
        if name == "start":
            assert next_step.wait(60)
        if name == "step" and seen.count("step") == 3:
            next_step.set()

    monkeypatch.setattr(setup, "load_model", counting)
    changes = [*WITHOUT_EVALUATION, "train.max_steps=3", "output.save_every=2"]
    train(load_spec(job, changes), device="cpu", on_point=on_point)
    for step in (2, 3):
        assert states(job.parent / "run", step)["(rest)/model.norm.forwards"] == step


def test_a_save_makes_no_copy_of_the_weights(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that is written is the memory that training uses, but for each unit's few numbers of format."""
    from lazytrain.jobs.checkpoint import files
    from lazytrain.jobs.executor import Streamed

    written, live = set(), set()
    write = files.write_tensors

    def spy(path, tensors):
        written.update((name, tensor.data_ptr()) for name, tensor in tensors.items() if tensor.numel() > 100)
        return write(path, tensors)

    def on_point(name: str) -> None:
        if name == "done":
            for _, weights, _ in streamed[0].unit_weights():
                live.update((n, t.data_ptr()) for n, t in weights.state().items() if t.numel() > 100)

    streamed: list[Streamed] = []
    original = Streamed.__init__
    monkeypatch.setattr(Streamed, "__init__", lambda self, *a: (streamed.append(self), original(self, *a))[1])
    monkeypatch.setattr(files, "write_tensors", spy)
    train(load_spec(job, [*WITHOUT_EVALUATION, "train.max_steps=2"]), device="cpu", on_point=on_point)
    assert live and live <= written


def test_the_best_state_is_kept_beside_the_newest(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([0.9, 0.5, 0.7, 0.6, 0.5])
    monkeypatch.setattr("lazytrain.jobs.train.evaluation.Evaluation.loss", lambda self: {"eval_loss": next(losses)})
    changes = ["output.keep=1", "output.save_every=3", "train.epochs=1", "evaluate.limit=1", "evaluate.every=0.2"]
    result = train(load_spec(job, changes), device="cpu")
    store = CheckpointStore(job.parent / "run" / "checkpoints")
    assert (result.best_step, result.best_eval_loss) == (4, 0.5)
    assert [checkpoint.step for checkpoint in store.all()] == [4, 10]
    best = store.best()
    assert best is not None and (best.step, best.score) == (4, 0.5)
    shutil.rmtree(best.path)
    assert train(load_spec(job, changes), device="cpu").status == "done"
    assert export_run(job.parent / "run", job.parent / "out", "best").step == 10


def test_a_state_that_is_not_finite_is_refused_and_the_finite_one_stays(job: Path) -> None:
    spec = load_spec(job, [*WITHOUT_EVALUATION, "output.save_every=2", "output.keep=1"])
    steps: list[str] = []

    def poison(name: str) -> None:
        if name == "stepped" and (steps.append(name) or len(steps) == 4):
            _, weights, ended = streamed[0].unit_weights()[0]
            ended.wait()
            weights.streamed[0] = float("nan")

    streamed = []
    from lazytrain.jobs.train import run

    original = run.stream
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "stream", lambda *a, **k: (streamed.append(original(*a, **k)), streamed[0])[1])
        with pytest.raises(CheckpointError, match="not finite"):
            train(spec, device="cpu", on_point=poison)
    assert [checkpoint.step for checkpoint in CheckpointStore(job.parent / "run" / "checkpoints").all()] == [2]


def test_a_step_that_is_not_finite_is_skipped_counted_and_saved_over(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 4 has a loss of NaN, and so has the evaluation after step 5; both steps are saved."""
    from lazytrain.jobs.objectives import Forward, Sft
    from lazytrain.jobs.tracking import read_metrics

    original, calls = Sft.forward, []
    losses = iter([float("nan"), 0.5])

    def forward(self, streamed, part, step):
        calls.append(step)
        output = original(self, streamed, part, step)
        return Forward(output.loss * float("nan")) if len(calls) == 4 else output

    monkeypatch.setattr(Sft, "forward", forward)
    monkeypatch.setattr("lazytrain.jobs.train.evaluation.Evaluation.loss", lambda self: {"eval_loss": next(losses)})
    settings = ["train.epochs=1", "output.save_every=1", "output.keep=9", "evaluate.limit=1"]
    result = train(load_spec(job, settings), device="cpu")
    rows = {row["step"]: row for row in read_metrics(job.parent / "run" / "metrics.jsonl") if "loss" in row}
    assert rows[4]["loss"] is None and rows[4]["nonfinite/loss"] == 1 and rows[4]["clip_scale"] == 0
    assert rows[5]["loss"] > 0
    saved = {checkpoint.step: checkpoint for checkpoint in CheckpointStore(job.parent / "run" / "checkpoints").all()}
    assert saved[4].trainer["loss"] is None and saved[4].trainer["optimizer_steps"] == 3
    assert (saved[5].score, saved[10].score) == (None, 0.5)
    assert (result.best_step, result.best_eval_loss) == (10, 0.5)
    weights = [saved[step].unit("model.norm")["master"] for step in (3, 4, 5)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 14)[None]).logits


def test_export_gives_the_same_logits_and_needs_nothing_but_the_run(job: Path) -> None:
    result = train(load_spec(job, ["evaluate.limit=1", "train.epochs=1"]), device="cpu")
    shutil.rmtree(job.parent / "model")
    moved = job.parent / "moved"
    (job.parent / "run").rename(moved)
    exported = export_run(moved, job.parent / "out")
    assert exported.step == result.steps == 10
    assert torch.equal(logits(job.parent / "out"), logits(moved / "model"))
    assert AutoTokenizer.from_pretrained(job.parent / "out")("add 1").input_ids
    best = export_run(moved, job.parent / "best", "best")
    assert (best.step, best.eval_loss) == (result.best_step, result.best_eval_loss)
    with pytest.raises(InputError, match="no checkpoint '7'"):
        export_run(moved, job.parent / "seven", "7")
    with pytest.raises(InputError, match="is there already"):
        export_run(moved, job.parent / "out")
    with pytest.raises(InputError, match="not the directory of a run"):
        export_run(job.parent / "best", job.parent / "nothing")


def test_a_run_goes_on_without_the_model_it_began_with(job: Path) -> None:
    settings = ["train.epochs=1", "evaluate.limit=1"]
    train(load_spec(job, [*settings, "output.dir=whole"]), device="cpu")
    steps: list[object] = []
    train(load_spec(job, settings), device="cpu", progress=steps.append, stop=lambda: len(steps) > 6)
    for file in (job.parent / "model").iterdir():
        file.unlink()
    (job.parent / "run").rename(job.parent / "moved")
    assert train(load_spec(job, [*settings, "output.dir=moved"]), device="cpu").status == "done"
    assert torch.equal(logits(job.parent / "moved" / "model"), logits(job.parent / "whole" / "model"))


def test_going_on_with_another_batch_uses_every_row_once_and_says_so(job: Path) -> None:
    """80 rows: two steps of 8, then steps of 16 for the 64 rows that the first epoch has left, then 80 rows again."""
    steps: list[object] = []
    settings = ["evaluate.limit=1", "evaluate.every=1"]
    spec = load_spec(job, settings)
    stopped = train(spec, device="cpu", progress=steps.append, stop=lambda: len(steps) > 2)
    assert stopped.steps == 2
    rows: list[int] = []
    from lazytrain.jobs.train import loop

    original = loop.collate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loop, "collate", lambda data, chosen, *a, **k: (rows.extend(chosen), original(data, chosen, *a, **k))[1]
        )
        more = load_spec(job, [*settings, "train.batch=16"])
        done = train(more, device="cpu")
    assert done.status == "done" and done.steps == 2 + 4 + 5
    assert len(set(rows[:64])) == 64 and sorted(rows[64:]) == list(range(80))
    assert len(done.notes) == 1 and "16 rows instead of 8" in done.notes[0] and "9 steps are left" in done.notes[0]


def test_another_device_and_policy_go_on_and_are_explained(job: Path) -> None:
    from lazytrain.jobs.introspect import model_facts
    from lazytrain.jobs.policy import Policy

    steps: list[object] = []
    settings = ["train.epochs=1", "evaluate.limit=1"]
    train(load_spec(job, settings), device="cpu", progress=steps.append, stop=lambda: len(steps) > 6)
    longest = json.loads((job.parent / "run" / "policy.json").read_text())["sequence_length"]
    facts = model_facts(
        AutoModelForCausalLM.from_pretrained(job.parent / "model"), micro_batch=4, sequence_length=longest,
        dtype="float32",
    )  # fmt: skip
    policy = Policy.from_homes(facts, ["host", "recompute", "gpu", "gpu"], accumulation=2)
    done = train(load_spec(job, settings), device=GPU, policy=policy)
    assert done.status == "done" and done.steps == 10
    assert len(done.notes) == 1 and "another policy" in done.notes[0]


def test_experts_are_exported_under_the_names_that_they_came_with(job: Path) -> None:
    """transformers keeps experts as one tensor; the folder that people published, and get back, has one for each."""
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=24, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(job.parent / "model")
    published = load_file(job.parent / "model" / "model.safetensors")
    assert any("experts.3." in name for name in published)
    spec = load_spec(job, [*WITHOUT_EVALUATION, "train.max_steps=2"])
    train(spec, device="cpu")
    export_run(job.parent / "run", job.parent / "out")
    for folder in ("run/model", "out"):
        exported = load_file(job.parent / folder / "model.safetensors")
        assert {n: t.shape for n, t in exported.items()} == {n: t.shape for n, t in published.items()}
        assert any(not torch.equal(tensor, published[name]) for name, tensor in exported.items())
    assert torch.equal(logits(job.parent / "run" / "model"), logits(job.parent / "out"))


def test_a_large_model_is_exported_in_several_files(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(load_spec(job, [*WITHOUT_EVALUATION, "train.max_steps=1"]), device="cpu")
    monkeypatch.setattr("lazytrain.jobs.checkpoint.export.SHARD_BYTES", 20_000)
    export_run(job.parent / "run", job.parent / "out")
    index = json.loads((job.parent / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (job.parent / "out").glob("*.safetensors"))
    assert len(shards) > 2 and shards == sorted(set(index["weight_map"].values()))
    assert torch.equal(logits(job.parent / "out"), logits(job.parent / "run" / "model"))


def test_an_embedding_larger_than_the_tokenizer_keeps_its_rows(job: Path, rewrite_model) -> None:
    rewrite_model(job.parent / "model", vocabulary=32)
    train(load_spec(job, [*WITHOUT_EVALUATION, "train.max_steps=1"]), device="cpu")
    model = AutoModelForCausalLM.from_pretrained(job.parent / "run" / "model")
    assert model.get_input_embeddings().weight.shape[0] == 32


def test_a_weight_that_no_checkpoint_would_hold_is_found_before_the_first_step(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lazytrain.jobs.errors import ModelError
    from lazytrain.jobs.executor import Streamed

    original = Streamed.layouts
    monkeypatch.setattr(
        Streamed, "layouts", lambda self: {k: v for k, v in original(self).items() if k != "model.norm"}
    )
    with pytest.raises(ModelError, match=r"would not be saved: model\.norm\.weight"):
        train(load_spec(job, WITHOUT_EVALUATION), device="cpu")
    assert not list((job.parent / "run" / "checkpoints").glob("step-*"))
