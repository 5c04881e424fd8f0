"""Preference optimization by the streamed model is the textbook's, with one model instead of two."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from lazytrain.jobs.data import Batch, collate, prepare
from lazytrain.jobs.errors import DataError, InputError
from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.objectives import Dpo
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import Data, load_spec
from lazytrain.jobs.tracking import read_metrics
from lazytrain.jobs.train import train

BETA = 0.3
GPU = Emulated(memory_bytes=1 << 28, h2d_bytes_s=1e9)


@pytest.fixture
def pairs(job: Path) -> Path:
    """Sums whose chosen answer is a number and whose rejected one is none, as a job file."""
    rows = [
        {"prompt": f"add {a} and {b}", "chosen": f"The answer is : {a + b}", "rejected": "The answer is : and"}
        for a in range(10)
        for b in range(4)
    ]
    (job.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = job.read_text().replace("train: {epochs", "train: {objective: dpo, dpo: {beta: 0.3}, epochs")
    job.write_text(text)
    return job


def textbook(model: torch.nn.Module, reference: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Sum of the pairs' losses, written out anew."""

    def log_probabilities(of: torch.nn.Module) -> torch.Tensor:
        logits = of(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
        labels = batch.labels[:, 1:]
        chosen = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return (chosen * (labels != -100)).sum(-1)

    policy = log_probabilities(model)
    with torch.no_grad():
        frozen = log_probabilities(reference)
    logits = BETA * ((policy[0::2] - policy[1::2]) - (frozen[0::2] - frozen[1::2]))
    return -torch.nn.functional.logsigmoid(logits).sum()


@pytest.mark.parametrize("device", ["cpu", GPU], ids=["cpu", "emulated"])
@pytest.mark.parametrize("chunk", [1 << 26, 60], ids=["one chunk", "many chunks"])
def test_gradients_are_plain_pytorchs(
    pairs: Path, device: str | Emulated, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazytrain.jobs.head_loss.LOGIT_CHUNK_ELEMENTS", chunk)
    spec = load_spec(pairs)
    data = prepare(spec.data, AutoTokenizer.from_pretrained(spec.model.path))
    reference = AutoModelForCausalLM.from_pretrained(spec.model.path).eval()
    model = copy.deepcopy(reference).train()
    step = collate(data.train, range(8), pad_id=0)
    facts = model_facts(model, micro_batch=4, sequence_length=step.input_ids.shape[1], dtype="float32")
    plain = copy.deepcopy(model)
    objective = Dpo(BETA)
    policy = Policy.from_homes(facts, ["host"] * len(facts.layers) + ["gpu"], accumulation=2)
    with stream(model, policy, device=device, facts=facts, optimizer=HybridAdamW(lr=1e-3)) as streamed:
        objective.begin(streamed, data, pairs.parent, pad_id=0)
        # Away from the start, where every margin is 0: noise on both models.
        torch.manual_seed(1)
        for name, parameter in plain.named_parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
            for unit in streamed._engine.units:
                for own, view in unit.named(unit.weights.streamed).items():
                    if own == name:
                        view.copy_(parameter.data)
        losses = []
        for part in step.split(4):
            forward = objective.forward(streamed, part, step)
            forward.loss.backward()
            losses.append(forward.loss.item())
        gradients = streamed.gradients()
    expected = textbook(plain, reference, step) / 4
    expected.backward()
    assert sum(losses) == pytest.approx(expected.item(), rel=1e-6)
    assert abs(expected.item() - 0.6931) > 1e-3
    for name, parameter in plain.named_parameters():
        assert (gradients[name] - parameter.grad).abs().max() <= 1e-6 * max(1.0, parameter.grad.abs().max().item())


def test_a_run_learns_to_prefer_and_goes_on_to_the_same_weights(pairs: Path) -> None:
    settings = ["train.epochs=6", "train.batch=8"]
    whole = train(load_spec(pairs, [*settings, "output.dir=whole"]), device="cpu")
    rows = [row for row in read_metrics(Path(whole.run_dir) / "metrics.jsonl") if "loss" in row]
    assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "at the start nothing is preferred"
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-4)
    assert whole.steps == len(rows) == 48 and whole.loss < 0.3
    assert rows[-1]["reward_accuracy"] == 1.0
    assert whole.exact_match is None
    seen: list[object] = []
    stopped = train(load_spec(pairs, settings), device="cpu", progress=seen.append, stop=lambda: len(seen) > 20)
    assert stopped.status == "stopped"
    (pairs.parent / "model" / "model.safetensors").unlink()  # the reference is with the run
    again = train(load_spec(pairs, settings), device=GPU)
    assert again.loss == whole.loss
    mine, other = (Path(result.run_dir) / "model" / "model.safetensors" for result in (again, whole))
    assert mine.read_bytes() == other.read_bytes()


def test_what_cannot_be_is_said(pairs: Path) -> None:
    with pytest.raises(InputError, match="must be even"):
        train(load_spec(pairs, ["train.batch=7"]), device="cpu")
    with pytest.raises(InputError, match="preference pairs, which train"):
        train(load_spec(pairs, ["train.objective=sft", "output.dir=b"]), device="cpu")
    (pairs.parent / "rows.jsonl").write_text('{"query": "add 1 and 1", "response": "The answer is : 2"}\n')
    with pytest.raises(InputError, match="learns from preference pairs"):
        train(load_spec(pairs, ["output.dir=c"]), device="cpu")


def test_a_model_whose_loss_needs_all_logits_at_once() -> None:
    from lazytrain.jobs.head_loss import Targets, log_probabilities_of_rows

    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=8)  # fmt: skip
    model = Qwen3ForCausalLM(config)
    ids = torch.randint(0, 30, (2, 7))
    labels = ids.clone()
    labels[:, :3] = -100
    logits = model(input_ids=ids).logits
    expected = [sum(logits[b, t - 1].log_softmax(-1)[ids[b, t]] for t in range(3, 7)) for b in range(2)]
    assert torch.allclose(log_probabilities_of_rows(logits, Targets.of(labels)), torch.stack(expected), rtol=1e-5)


def test_mixed_files_are_refused(pairs: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text('{"query": "add 1 and 1", "response": "The answer is : 2"}\n')
    data = Data.model_validate(
        {"train": [{"path": str(pairs.parent / "rows.jsonl")}, {"path": str(tmp_path / "plain.jsonl")}]}
    )
    with pytest.raises(DataError, match="mixed"):
        prepare(data, AutoTokenizer.from_pretrained(pairs.parent / "model"))
