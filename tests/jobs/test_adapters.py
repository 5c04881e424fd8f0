"""Adapters in a model, without a run."""

from __future__ import annotations

import sys
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lazytrain.jobs.adapters import add_adapters, load_with_adapters, save_adapters, weights_digest
from lazytrain.jobs.errors import InputError, ModelError
from lazytrain.jobs.fake_model import meta_model
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.spec import Lora, Model

SHAPE = {"micro_batch": 3, "sequence_length": 16, "dtype": "float32"}


@pytest.fixture
def model(job: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(job.parent / "model", dtype=torch.float32)


def values(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_the_seed_alone_decides_the_adapters(job: Path) -> None:
    made = []
    for noise, seed in ((1, 5), (2, 5), (1, 6)):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        model = AutoModelForCausalLM.from_pretrained(job.parent / "model")
        made.append(values(add_adapters(model, Lora(rank=4), seed=seed)))
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert not all(torch.equal(made[0][name], made[2][name]) for name in made[0])
    assert all(".lora_" in name for name in made[0]) and len(made[0]) == 3 * 7 * 2


def test_without_the_section_nothing_changes(model) -> None:
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    assert add_adapters(model, None, seed=0) is model
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before


def test_facts_without_weights_are_those_of_the_model(model) -> None:
    """A plan is only valid for equal facts."""
    lora = Lora(rank=4, target_modules=("q_proj", "down_proj"))
    full = model_facts(model, **SHAPE)
    shape = add_adapters(meta_model(model.config, torch.float32), lora, seed=0)
    assert all(parameter.is_meta for parameter in shape.parameters())
    facts = model_facts(shape, **SHAPE)
    assert facts.digest == model_facts(add_adapters(model, lora, seed=1), **SHAPE).digest
    assert facts.trainable_parameters == 3 * 4 * (32 + 32 + 48 + 32) == facts.parameters - full.parameters
    assert facts.layers[0].gradient_bytes < full.layers[0].gradient_bytes / 5


@pytest.mark.parametrize(
    "targets, message, hint",
    [
        (["atention"], "no module 'atention'", "It has down_proj, "),
        (["up_prj"], "no module 'up_prj'", "did you mean up_proj"),
        (["self_attn"], "no module 'self_attn'", "q_proj"),
        (["embed_tokens"], "shares its weights", "leave it out"),
        (["lm_head"], "shares its weights", "leave it out"),
    ],
)
def test_targets_that_cannot_have_adapters_are_named(model, targets, message, hint) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        add_adapters(model, Lora(target_modules=tuple(targets)), seed=0)
    assert hint in raised.value.hint
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_a_model_of_other_layers_than_linear_has_adapters(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=20, n_positions=32)
    model = add_adapters(GPT2LMHeadModel(config), Lora(rank=2, target_modules=("c_attn",)), seed=0)
    assert model_facts(model, **SHAPE).trainable_parameters == 2 * 2 * (16 + 48)


def test_without_peft_it_is_said_how_to_install_it(model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match="needs the package peft") as raised:
        add_adapters(model, Lora(), seed=0)
    assert "lazytrain[lora]" in raised.value.hint


def test_adapters_that_others_made_are_loaded(job: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(job.parent / "model")
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules=["o_proj"], init_lora_weights=False))
    theirs.save_pretrained(tmp_path / "theirs")
    model, tokenizer = load_with_adapters(Model(path=str(tmp_path / "theirs"), dtype="float32"))
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, theirs.eval()(ids).logits)
    assert len(tokenizer) == 19


@pytest.mark.parametrize("wrong", ["other modules", "no weights", "another kind"])
def test_adapters_of_something_else_are_refused(job: Path, tmp_path: Path, wrong: str) -> None:
    folder = tmp_path / "adapters"
    base = AutoModelForCausalLM.from_pretrained(job.parent / "model")
    kind = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]) if wrong == "another kind" else (
        peft.LoraConfig(r=3, target_modules=["o_proj"])
    )  # fmt: skip
    peft.get_peft_model(base, kind).save_pretrained(folder)
    if wrong == "no weights":
        (folder / "adapter_model.safetensors").unlink()
    if wrong == "other modules":
        other = AutoModelForCausalLM.from_pretrained(job.parent / "model")
        add_adapters(other, Lora(target_modules=("q_proj",)), seed=0)
        config = (folder / "adapter_config.json").read_text()
        save_adapters_anew(other, folder)
        (folder / "adapter_config.json").write_text(config)
    with pytest.raises(ModelError, match="are not of" if wrong == "other modules" else "no LoRA adapters"):
        load_with_adapters(Model(path=str(folder), dtype="float32"))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_model.safetensors", b"cut"),
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b"[]"),
        ("adapter_config.json", b'{"peft_type": "LORA", "r": []}'),
    ],
)
def test_damaged_adapters_are_named(job: Path, tmp_path: Path, file: str, content: bytes) -> None:
    base = AutoModelForCausalLM.from_pretrained(job.parent / "model")
    peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules=["o_proj"])).save_pretrained(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_with_adapters(Model(path=str(tmp_path), dtype="float32"))


def save_adapters_anew(model, folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    save_adapters(model, [values(model)], "elsewhere", folder)


def test_the_digest_tells_other_weights_apart(model) -> None:
    first = weights_digest(model)
    assert weights_digest(model) == first
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    assert weights_digest(model) != first
