"""Hugging Face's Trainer drives a streamed model as it is, and comes to what it comes to with the plain model."""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from lazytrain.jobs.errors import CheckpointError, ProgramError
from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy

HOMES = ["host", "recompute", "gpu", "nvme", "recompute", "gpu"]
LR, DECAY = 2e-3, 0.1


def plain_adamw(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed, others = ([p for p in parameters if (p.ndim >= 2) == big] for big in (True, False))
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR)


@contextlib.contextmanager
def streaming(model, facts, **options):
    optimizer = HybridAdamW(**{"lr": LR, "weight_decay": DECAY, "state_bits": 32, **options})
    policy = Policy.from_homes(facts, HOMES)
    with stream(model, policy, device=Emulated(memory_bytes=1 << 30), optimizer=optimizer, facts=facts) as streamed:
        yield streamed


@pytest.fixture
def rows(make_batch):
    """Rows for 20 steps of at most two micro-batches of three: the last window of an epoch has one."""
    return [{n: t[0] for n, t in make_batch(seed, rows=1).items()} for seed in range(3 * 13)]


def collate(features):
    """Rows of different lengths, padded on the right."""
    batch = {name: torch.stack([f[name] for f in features]) for name in features[0]}
    for row in range(1, len(features)):
        batch["labels"][row, -2 * row :], batch["attention_mask"][row, -2 * row :] = -100, 0
    return batch


def arguments(directory, **options):
    defaults = {
        "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 20, "warmup_steps": 3,
        "max_grad_norm": 1.35, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 6, "save_strategy": "no",
        "per_device_eval_batch_size": 3, "report_to": [], "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(str(directory), **{**defaults, **options})


def trainer_of(model, optimizer, args, rows):
    return Trainer(
        model, args, train_dataset=rows, eval_dataset=rows[:6], data_collator=collate, optimizers=(optimizer, None)
    )


def values(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same_run(got, wanted, tolerance=1e-5):
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert values(got, name) == pytest.approx(values(wanted, name), rel=tolerance, abs=1e-9), name


def assert_same_weights(model, reference, tolerance=1e-4):
    weights = model.state_dict()
    for name, wanted in reference.state_dict().items():
        assert torch.allclose(weights[name], wanted, rtol=tolerance, atol=1e-5), name


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_twenty_steps_are_those_of_the_plain_model(family, make_model, facts_of, rows, tmp_path):
    reference, model = (make_model(family, seed=1, dropout=False) for _ in range(2))
    wanted = trainer_of(reference, plain_adamw(reference), arguments(tmp_path), rows)
    wanted.train()
    with streaming(model, facts_of(family)) as streamed:
        got = trainer_of(streamed.model, streamed.trainer_optimizer(), arguments(tmp_path), rows)
        got.train()
        assert_same_run(got, wanted)
        assert_same_weights(streamed.model, reference)
    norms = values(wanted, "grad_norm")
    assert len(norms) == 20 and min(norms) < 1.35 < max(norms)  # some steps are clipped, some are not


def test_save_and_resume(make_model, facts_of, rows, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 7, "max_steps": 14}
    reference = make_model("qwen3", seed=1, dropout=False)
    wanted = trainer_of(reference, plain_adamw(reference), arguments(tmp_path / "plain"), rows)
    wanted.args.max_steps = 14
    wanted.train()
    with streaming(make_model("qwen3", seed=1, dropout=False), facts_of("qwen3")) as streamed:
        optimizer = streamed.trainer_optimizer()
        trainer_of(streamed.model, optimizer, arguments(tmp_path / "run", **options), rows).train()
        whole = streamed.state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-14", dtype=torch.float32)
    assert all(torch.equal(saved.state_dict()[name], tensor) for name, tensor in whole.items())
    with streaming(make_model("qwen3", seed=2, dropout=False), facts_of("qwen3")) as streamed:
        got = trainer_of(streamed.model, streamed.trainer_optimizer(), arguments(tmp_path / "run", **options), rows)
        got.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-7"))
        assert streamed.steps == 14
        assert all(torch.equal(tensor, whole[name]) for name, tensor in streamed.state_dict().items())
    assert_same_run(got, wanted)


def test_what_a_step_drops_counts_for_nothing(make_model, facts_of, make_batch):
    facts = facts_of("qwen3")
    losses = {}
    for drops in (False, True):
        with streaming(make_model("qwen3", dropout=False), facts) as streamed:
            optimizer = streamed.trainer_optimizer()
            for step in range(3):
                if drops:
                    streamed.model(**make_batch(50 + step)).loss.backward()
                    (streamed.model if step else optimizer).zero_grad()
                for micro in range(3):
                    loss = streamed.model(**make_batch(3 * step + micro)).loss / 3
                    loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(streamed.model.parameters(), 0.5)
                optimizer.step()
                streamed.model.zero_grad()
                losses.setdefault(drops, []).append((loss.item(), norm.item()))
    assert losses[True] == losses[False]


def test_the_trainers_norm_and_ours_are_both_kept(make_model, facts_of, make_batch):
    facts, batch, weights = facts_of("qwen3"), make_batch(), []
    for limit, scale in ((None, 0.25), (0.25, 1.0), (0.25, 0.75)):
        with streaming(make_model("qwen3", dropout=False), facts, max_grad_norm=limit, eps=1.0) as streamed:
            optimizer = streamed.trainer_optimizer()
            streamed.model(**batch).loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(streamed.model.parameters(), scale)
            assert norm > 1
            optimizer.step()
            weights.append(streamed.state_dict())
    for other in weights[1:]:
        assert all(torch.allclose(other[name], tensor, atol=1e-6) for name, tensor in weights[0].items())


def test_clipping_one_by_one_is_refused(make_model, facts_of, make_batch):
    with streaming(make_model("qwen3", dropout=False), facts_of("qwen3")) as streamed:
        optimizer = streamed.trainer_optimizer()
        streamed.model(**make_batch()).loss.backward()
        torch.nn.utils.clip_grad_value_(streamed.model.parameters(), 1e-3)
        with pytest.raises(ProgramError, match="one by one"):
            optimizer.step()
        optimizer.zero_grad()
        streamed.model(**make_batch()).loss.backward()
        assert [p.grad is not None for p in streamed.model.parameters()].count(True) == 1
        optimizer.step()
        assert streamed.steps == 1 and streamed.model.lm_head.weight.dtype == torch.float32


def test_the_state_is_small_before_the_first_step_and_stays_on_the_host(make_model, facts_of, make_batch, tmp_path):
    with streaming(make_model("qwen3"), facts_of("qwen3")) as streamed:
        optimizer = streamed.trainer_optimizer()
        assert optimizer.state_dict()["state"] == {}
        streamed.model(**make_batch()).loss.backward()
        optimizer.step()
        state = optimizer.state_dict()
        tensor = state["state"]["model.layers.1"]["m"]
        assert tensor.any() and tensor.to("meta").device.type == "cpu"
        torch.save(state, tmp_path / "state")
        assert type(torch.load(tmp_path / "state", weights_only=True)["state"]["model.layers.1"]["m"]) is torch.Tensor
        with pytest.raises(CheckpointError, match="another model"):
            optimizer.load_state_dict({**state, "state": {"model.layers.9": {}}})
        with pytest.raises(CheckpointError, match="no optimizer state of a streamed model"):
            optimizer.load_state_dict(plain_adamw(make_model("qwen3")).state_dict())


def test_what_cannot_work_is_refused(make_model, facts_of, make_batch):
    with streaming(make_model("qwen3"), facts_of("qwen3")) as streamed:
        optimizer = streamed.trainer_optimizer()
        with pytest.raises(ProgramError, match="step\\(\\) came before"):
            optimizer.step()
        with pytest.raises(ProgramError, match="evaluate the loss again"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(ProgramError, match="one parameter group"):
            optimizer.add_param_group({"params": []})
        with pytest.raises(ProgramError, match="resize_token_embeddings"):
            streamed.model.resize_token_embeddings(60)
        with pytest.raises(ProgramError, match="other tensors"):
            streamed.model.load_state_dict(streamed.state_dict(), assign=True)
        with pytest.raises(RuntimeError, match="size mismatch"):
            streamed.model.load_state_dict({"model.norm.weight": torch.zeros(3)}, strict=False)
    with (
        stream(make_model("qwen3"), Policy.from_homes(facts_of("qwen3"), HOMES), device="cpu") as streamed,
        pytest.raises(ProgramError, match="needs an optimizer"),
    ):
        streamed.trainer_optimizer()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_under_autocast_are_those_of_the_plain_model(dtype, make_model, make_batch):
    def gradients(model):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**inputs, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()).backward()

    inputs = make_batch()
    labels = inputs.pop("labels")
    model = make_model("qwen3").to(dtype)
    gradients(model)
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    facts = model_facts(model, micro_batch=3, sequence_length=17, dtype=str(dtype).removeprefix("torch."))
    with stream(model, Policy.from_homes(facts, HOMES), device="cpu", facts=facts) as streamed:
        gradients(streamed.model)
        got = streamed.gradients()
    for name, gradient in wanted.items():
        error = (got[name].float() - gradient.float()).norm() / gradient.float().norm()
        assert error <= (1e-6 if dtype == torch.float32 else 0.01), f"{name}: {error:.1e}"
