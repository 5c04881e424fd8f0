"""In bfloat16 too, streaming changes no bit: against the same calls without it, and over steps of training."""

from __future__ import annotations

import pytest
import torch

from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy

LENGTH, ROWS, LAYERS = 17, 3, 5


@pytest.fixture(scope="module")
def facts(make_model):
    model = make_model("llama", dropout=False).to(torch.bfloat16)
    return model_facts(model, micro_batch=ROWS, sequence_length=LENGTH, dtype="bfloat16")


def own_loss(model, batch):
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_the_same_calls_to_the_bit(seed, facts, make_model, make_batch, random_policy):
    model = make_model("llama", dropout=False).to(torch.bfloat16)
    own_loss(model, make_batch(seed)).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    policy = random_policy(facts, seed)
    with stream(model, policy, device=Emulated(memory_bytes=1 << 30), facts=facts, debug=True) as streamed:
        own_loss(streamed.model, make_batch(seed)).backward()
        got = streamed.gradients()
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert got[name].dtype == torch.bfloat16
        assert torch.equal(got[name], gradient), name


def train(facts, policy, device, make_model, make_batch):
    optimizer = HybridAdamW(lr=1e-2, max_grad_norm=1.0)
    losses = []
    with stream(make_model("llama", dropout=False).to(torch.bfloat16), policy, device=device, optimizer=optimizer,
                facts=facts) as streamed:  # fmt: skip
        for _ in range(6):
            for micro in range(2):
                loss = streamed.model(**make_batch(micro)).loss
                loss.backward()
                losses.append(loss.item())
            streamed.step()
        state = {unit: {k: t.clone() for k, t in state.items()} for unit, state in streamed.unit_states()}
    return losses, state


def test_steps_of_training_are_the_same_to_the_bit_under_any_policy(facts, make_model, make_batch, random_policy):
    homes = ["gpu"] * (LAYERS + 1)
    losses, wanted = train(facts, Policy.from_homes(facts, homes, accumulation=2), "cpu", make_model, make_batch)
    assert losses[-1] < 0.9 * losses[0]
    policy = random_policy(facts, 6, accumulation=2)
    same, got = train(facts, policy, Emulated(memory_bytes=1 << 30), make_model, make_batch)
    assert same == losses
    for unit, state in wanted.items():
        assert all(torch.equal(tensor, got[unit][name]) for name, tensor in state.items()), unit
