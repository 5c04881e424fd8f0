"""Adapters and frozen parameters: what learns is as in plain PyTorch, and what does not costs weights only."""

from __future__ import annotations

import contextlib

import peft
import pytest
import torch
from transformers import Trainer, TrainingArguments

from lazytrain.jobs.errors import ModelError, ProgramError
from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy, lower

ROWS, LENGTH, LR = 3, 17, 1e-2
QWEN = ["q_proj", "v_proj", "down_proj"]


def with_adapters(model, **options):
    """A peft model whose adapters do something from the start."""
    torch.manual_seed(3)
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": QWEN, **options}
    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return made.train()


def facts_of(model):
    return model_facts(model, micro_batch=ROWS, sequence_length=LENGTH, dtype="float32")


@contextlib.contextmanager
def streaming(model, policy=None, **options):
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    facts = facts_of(base)
    policy = policy or Policy.from_homes(facts, ["host", "recompute", "gpu", "nvme", "recompute", "gpu"])
    optimizer = HybridAdamW(**{"lr": LR, "state_bits": 32, **options})
    with stream(model, policy, device=Emulated(memory_bytes=1 << 30), optimizer=optimizer, facts=facts) as streamed:
        yield streamed


def loss_of(model, batch):
    torch.manual_seed(99)
    return model(**batch, use_cache=False).loss


def gradients_of(model, batch):
    loss = loss_of(model, batch)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.item(), gradients


def assert_same_gradients(got, wanted):
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = (got[name] - gradient).norm() / gradient.norm().clamp_min(1e-9)
        assert error <= 1e-6, f"{name}: relative error {error:.1e}"


def packed(make_batch):
    """Two documents in each row."""
    ids = make_batch(4)["input_ids"]
    positions = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)]).expand(ROWS, -1)
    return {"input_ids": ids[:1], "position_ids": positions[:1], "labels": ids[:1].clone()}


@pytest.mark.parametrize("batch_is", ["padded", "packed"])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_adapters_are_those_of_plain_peft(seed, batch_is, make_model, make_batch, random_policy):
    model = with_adapters(make_model("qwen3", seed=seed, attention_dropout=0.1))
    batch = packed(make_batch) if batch_is == "packed" else make_batch(seed)
    loss, wanted = gradients_of(model, batch)
    policy = random_policy(facts_of(model.get_base_model()), seed)
    with streaming(model, policy) as streamed:
        got = loss_of(streamed.model, batch)
        got.backward()
        assert got.item() == pytest.approx(loss, rel=1e-6)
        assert_same_gradients(streamed.gradients(), wanted)
    assert all("lora" in name for name in wanted)


def test_the_model_without_its_adapters_is_a_reference_between_forward_and_backward(make_model, make_batch):
    model, batch = with_adapters(make_model("qwen3"), lora_dropout=0.0), make_batch()
    del batch["labels"]

    def distance(model):
        logits = model(**batch, use_cache=False).logits
        with torch.no_grad(), model.disable_adapter():
            reference = model(**batch, use_cache=False).logits
        loss = (logits - reference).square().mean()
        loss.backward()
        return loss.item()

    loss = distance(model)
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with streaming(model) as streamed:
        assert distance(streamed.model) == pytest.approx(loss, rel=1e-5)
        assert_same_gradients(streamed.gradients(), wanted)
    assert loss > 1e-4


FREEZE = {
    "only norms learn": lambda name: "norm" in name,
    "first layers are frozen": lambda name: "layers.3." in name or "layers.4." in name or "norm" in name,
    "a layer in the middle is frozen": lambda name: "layers.2." not in name,
    "the head and embeddings are frozen": lambda name: "embed" not in name and "lm_head" not in name,
    "only embeddings learn": lambda name: "embed" in name,
}


@pytest.mark.parametrize("what", FREEZE)
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_gradients_and_steps_with_frozen_parameters(family, what, make_model, make_batch, random_policy):
    model, batch = make_model(family), make_batch()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(FREEZE[what](name))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss, wanted = gradients_of(model, batch)
    with streaming(model, random_policy(facts_of(model), 7), weight_decay=0.1) as streamed:
        got = loss_of(streamed.model, batch)
        got.backward()
        assert got.item() == pytest.approx(loss, rel=1e-6)
        assert_same_gradients(streamed.gradients(), wanted)
        streamed.step()
        after = streamed.state_dict()
    assert {name for name, p in before.items() if not torch.equal(after[name], p)} == set(wanted)


def test_what_is_frozen_has_no_gradient_state_or_transfer(make_model, make_batch):
    model = with_adapters(make_model("qwen2"))
    facts = facts_of(model.get_base_model())
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert facts.trainable_parameters == adapters
    program = lower(Policy.from_homes(facts, ["host"] * 5 + ["gpu"]), facts)
    learning = {u for u, unit in enumerate(facts.units) if unit.gradient_bytes}
    for kind in ("gradient", "norm", "update"):
        assert {op.unit for op in program.ops if op.kind == kind} == learning
    assert learning == set(range(len(facts.before), len(facts.before) + len(facts.layers)))
    with streaming(model) as streamed:
        streamed.model(**make_batch()).loss.backward()
        streamed.step()
        held = streamed.host_bytes()
    padded = sum(unit.gradient_bytes for unit in facts.layers)
    assert held["gradients"] == padded < 2 * 4 * adapters
    weights = sum(unit.weight_bytes for unit in facts.units)
    assert weights + 8 * adapters <= held["weights_and_state"] <= weights + 2 * padded + 4096


def test_facts_price_a_smaller_backward(make_model):
    full = facts_of(make_model("qwen2"))
    lora = facts_of(with_adapters(make_model("qwen2")).get_base_model())
    assert lora.layers[0].frozen_parameters == full.layers[0].parameters
    assert lora.layers[0].gradient_bytes < 0.5 * full.layers[0].gradient_bytes
    assert full.layers[0].gradient_bytes == full.layers[0].weight_bytes


def test_trainer_trains_and_saves_adapters(make_model, make_batch, tmp_path):
    plain, model = (with_adapters(make_model("qwen3", seed=1), lora_dropout=0.0) for _ in range(2))
    rows = [{n: t[0] for n, t in make_batch(seed, rows=1).items()} for seed in range(36)]
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=3, gradient_accumulation_steps=2, max_steps=10, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    runs = []
    adamw = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
    with streaming(model) as streamed:
        for each, optimizer in ((plain, adamw), (streamed.model, streamed.trainer_optimizer())):
            trainer = Trainer(each, args, train_dataset=rows, optimizers=(optimizer, None))
            trainer.train()
            runs.append([entry[key] for entry in trainer.state.log_history[:-1] for key in ("loss", "grad_norm")])
        trainer.save_model(str(tmp_path / "adapters"))
        streamed.save_pretrained(tmp_path / "again")
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
    batch = make_batch(77)
    wanted = plain.eval()(**batch, use_cache=False).logits
    for directory in ("adapters", "again"):
        assert {path.suffix for path in (tmp_path / directory).glob("adapter_*")} == {".json", ".safetensors"}
        loaded = peft.PeftModel.from_pretrained(make_model("qwen3", seed=1), tmp_path / directory).eval()
        assert torch.allclose(loaded(**batch, use_cache=False).logits, wanted, atol=1e-4)


def test_adapters_are_added_before(make_model, make_batch):
    with streaming(make_model("qwen2")) as streamed:
        with pytest.raises(ProgramError, match="add_adapter"):
            streamed.model.add_adapter(peft.LoraConfig(target_modules=QWEN))
        for parameter in streamed.model.model.layers[1].parameters():
            parameter.requires_grad_(False)
        with pytest.raises(ProgramError, match="removed or frozen"):
            streamed.model(**make_batch())
    prompts = peft.get_peft_model(
        make_model("qwen2"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ModelError, match="no part of the model"), streaming(prompts):
        pass
