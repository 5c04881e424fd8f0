"""Architectures of different kinds against plain PyTorch: the same check as the `families` benchmark runs on all."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lazytrain.jobs.errors import ProgramError
from lazytrain.jobs.executor import stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy

families = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "families.py")))

KINDS = {
    "gemma3_text": "two rotary tables, scaled embeddings",
    "gemma4_text": "later layers read keys and values of earlier ones, and inputs of their own",
    "gpt_oss": "experts, attention sinks",
    "qwen3_5_text": "linear attention between full attention",
    "mamba": "no attention at all",
    "bloom": "positions as attention biases, a norm before the layers",
    "recurrent_gemma": "recurrent blocks between attention",
    "bert": "a head of several modules, tied in part",
    "bart": "a second list of layers that text does not reach",
    "mllama": "layers that only images reach",
    "phimoe": "a router that draws random numbers",
    "gpt2": "dropout, tied head",
    "doge": "attention whose mask learns",
    "deepseek_v3": "latent attention, shared experts",
}


def facts_of(model):
    return model_facts(model, micro_batch=families.ROWS, sequence_length=families.LENGTH, dtype="float32")


def policy_of(facts):
    homes = ["host", *(("gpu", "host", "nvme")[i % 3] for i in range(len(facts.layers) - 1)), "gpu"]
    return Policy.from_homes(facts, homes)


@pytest.mark.parametrize("architecture", KINDS)
def test_gradients_are_those_of_plain_pytorch_to_the_bit(architecture):
    result = families.check(architecture)
    assert result["status"] == "exact", result


LEARNS = {"all": "", "attention": "self_attn", "routers": "gate"}


@pytest.mark.parametrize("learns", LEARNS)
@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_the_balance_of_experts_is_part_of_the_loss_and_of_the_gradient(architecture, learns):
    model = families.small_model(architecture)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(LEARNS[learns] in name)
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    batch = families.make_batch(0)
    wanted = families.plain(model, batch, own=True)
    model.config.output_router_logits = False
    without = families.plain(model, batch, own=True)
    model.config.output_router_logits = True
    facts = facts_of(model)
    with stream(model, families.random_policy(facts, 3), device="cpu", facts=facts) as streamed:
        loss = families.loss_of(streamed.model, batch, own=True)
        loss.backward()
        got = loss.item(), streamed.gradients()
    assert wanted[0] > without[0] + 0.1
    assert families.difference(got, wanted) <= families.TOLERANCE


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss", "qwen3_5_text", "bloom"])
def test_generate_gives_the_tokens_of_the_plain_model(architecture):
    model = families.small_model(architecture).eval()
    prompt = families.make_batch(1)["input_ids"][:, :6]
    mask = torch.ones_like(prompt)
    prompt[0, :2], mask[0, :2] = 2, 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(prompt, **options)
    facts = facts_of(model)
    with stream(model, policy_of(facts), device="cpu", facts=facts) as streamed:
        assert torch.equal(streamed.model.generate(prompt, **options), wanted)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_packed_rows(architecture):
    model = families.small_model(architecture)
    ids = families.make_batch(2)["input_ids"][:1]
    positions = torch.cat([torch.arange(7), torch.arange(ids.shape[1] - 7)])[None]
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids.clone()}
    wanted = families.plain(model, batch, own=True)
    unpacked = families.plain(model, {"input_ids": ids, "labels": ids.clone()}, own=True)
    facts = facts_of(model)
    with stream(model, families.random_policy(facts, 5), device="cpu", facts=facts) as streamed:
        loss = families.loss_of(streamed.model, batch, own=True)
        loss.backward()
        got = loss.item(), streamed.gradients()
    assert families.difference(got, wanted) <= families.TOLERANCE
    assert families.difference(unpacked, wanted) > families.TOLERANCE


def test_frozen_parameters_stay_as_they_are():
    model = families.small_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wanted = families.plain(model, families.make_batch(0), own=True)
    facts, optimizer = facts_of(model), HybridAdamW(lr=1e-2, weight_decay=0.1, state_bits=32)
    with stream(model, policy_of(facts), device="cpu", optimizer=optimizer, facts=facts) as streamed:
        loss = families.loss_of(streamed.model, families.make_batch(0), own=True)
        loss.backward()
        assert families.difference((loss.item(), streamed.gradients()), wanted) <= families.TOLERANCE
        streamed.step()
        after = streamed.state_dict()
    assert all(torch.equal(after[name], p) == ("q_proj" not in name) for name, p in before.items())


def test_layers_that_are_called_many_times_partly_without_gradient():
    model = families.small_model("hrm_text", H_cycles=1, L_cycles=2, num_layers_per_stack=1)
    batch = families.make_batch(0)
    wanted = families.plain(model, batch, own=True)
    facts = facts_of(model)
    assert any("#2" in unit.name for unit in facts.units)
    with stream(model, policy_of(facts), device="cpu", facts=facts) as streamed:
        loss = families.loss_of(streamed.model, batch, own=True)
        loss.backward()
        got = loss.item(), streamed.gradients()
    assert families.difference(got, wanted) <= families.TOLERANCE


def test_a_part_that_text_does_not_reach_is_kept_and_refuses_to_run():
    model = families.small_model("llama")
    facts = facts_of(model)
    model.model.vision = torch.nn.Linear(4, 4)
    names = {name for name, _ in model.named_parameters()}
    with stream(model, policy_of(facts), device="cpu", facts=facts) as streamed:
        assert streamed.state_dict().keys() == names
        with pytest.raises(ProgramError, match="no forward of text reaches"):
            model.model.vision(torch.zeros(1, 4))
    assert model.model.vision(torch.zeros(1, 4)).shape == (1, 4)
