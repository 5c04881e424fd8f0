"""Streaming changes where tensors are, never what is computed: gradients against one ordinary backward."""

from __future__ import annotations

import pytest
import torch

from lazytrain.jobs.errors import ProgramError
from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.policy import Policy, lower

FREE_LINKS = Emulated(memory_bytes=1 << 30)


def reference(model, batches, seed=99):
    """Loss and gradients of plain PyTorch, over all micro-batches together."""
    count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    torch.manual_seed(seed)
    loss = 0.0
    for batch in batches:
        out = model(**batch, use_cache=False, num_items_in_batch=count).loss
        out.backward()
        loss += out.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss, gradients, count


def streamed_gradients(streamed, batches, count, seed=99):
    torch.manual_seed(seed)
    loss = 0.0
    for batch in batches:
        out = streamed.model(**batch, num_items_in_batch=count).loss
        out.backward()
        loss += out.item()
    return loss, streamed.gradients()


def assert_equal(got, wanted, tolerance=1e-6):
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = (got[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("device", ["cpu", FREE_LINKS], ids=["cpu", "emulated"])
def test_every_random_policy_gives_the_gradients_of_plain_pytorch(
    family, device, seed, make_model, facts_of, random_policy, make_batch
):
    model, facts = make_model(family, seed=seed), facts_of(family)
    policy = random_policy(facts, seed, accumulation=1 + seed % 2)
    batches = [make_batch(seed + i) for i in range(policy.accumulation)]
    loss, gradients, count = reference(model, batches)
    with stream(model, policy, device=device, facts=facts) as streamed:
        got_loss, got = streamed_gradients(streamed, batches, count)
    assert got_loss == pytest.approx(loss, rel=1e-6)
    assert_equal(got, gradients)


def test_the_default_loss_is_the_mean_over_supervised_tokens(family, make_model, facts_of, make_batch):
    model, facts, batch = make_model(family, dropout=False), facts_of(family), make_batch()
    wanted = model(**batch, use_cache=False).loss.item()
    with stream(model, Policy.from_homes(facts, ["host"] * 5 + ["gpu"]), device="cpu", facts=facts) as streamed:
        assert streamed.model(**batch).loss.item() == pytest.approx(wanted, rel=1e-6)


def test_a_scaled_loss_scales_every_gradient(make_model, facts_of, make_batch):
    model, facts, batch = make_model("qwen3"), facts_of("qwen3"), make_batch()
    with stream(model, Policy.from_homes(facts, ["gpu"] * 6), device="cpu", facts=facts) as streamed:
        streamed.model(**batch).loss.backward()
        once = streamed.gradients()
        (3 * streamed.model(**batch).loss).backward()
        thrice = streamed.gradients()
    assert_equal(thrice, {name: 3 * g for name, g in once.items()})


def test_a_row_without_a_supervised_token_has_no_gradient(make_model, facts_of, make_batch):
    model, facts, batch = make_model("llama"), facts_of("llama"), make_batch()
    batch["labels"][:] = -100
    with stream(model, Policy.from_homes(facts, ["gpu"] * 6), device="cpu", facts=facts) as streamed:
        loss = streamed.model(**batch).loss
        loss.backward()
        assert loss.item() == 0.0
        assert all(not g.any() for g in streamed.gradients().values())


@pytest.mark.parametrize("rows, length", [(1, 3), (2, 17), (3, 1 + 4)])
def test_a_smaller_batch_than_the_policy_plans_for_is_right_too(
    rows, length, make_model, facts_of, random_policy, make_batch
):
    model, facts, batch = make_model("gpt2"), facts_of("gpt2"), make_batch(rows=rows, length=length)
    batch["labels"] = batch["input_ids"].clone()
    loss, gradients, count = reference(model, [batch])
    with stream(model, random_policy(facts, 3), device=FREE_LINKS, facts=facts) as streamed:
        got_loss, got = streamed_gradients(streamed, [batch], count)
    assert got_loss == pytest.approx(loss, rel=1e-6)
    assert_equal(got, gradients)


def test_a_larger_batch_than_the_policy_plans_for_is_refused(make_model, facts_of, make_batch):
    facts = facts_of("llama")
    with (
        stream(make_model("llama"), Policy.from_homes(facts, ["host"] * 5 + ["gpu"]), device="cpu", facts=facts) as s,
        pytest.raises(ProgramError, match="batch"),
    ):
        s.model(**make_batch(rows=4))


def test_close_gives_the_model_back_as_it_was(family, make_model, facts_of, make_batch):
    model, batch = make_model(family, dropout=False), make_batch()
    wanted = model(**batch, use_cache=False).logits
    facts = facts_of(family)
    with stream(model, Policy.from_homes(facts, ["gpu"] * 6), device="cpu", facts=facts) as streamed:
        streamed.model(**batch).loss.backward()
    assert torch.equal(model(**batch, use_cache=False).logits, wanted)


@pytest.mark.parametrize("seed", range(6))
def test_bytes_moved_equal_those_of_the_program(family, seed, make_model, facts_of, random_policy, make_batch):
    facts = facts_of(family)
    policy = random_policy(facts, seed, accumulation=1 + seed % 3)
    program = lower(policy, facts)
    batch = make_batch()
    with stream(make_model(family), policy, device=FREE_LINKS, facts=facts) as streamed:
        for _ in range(policy.accumulation):
            streamed.model(**batch).loss.backward()
        streamed.gradients()
        moved = {k: v for k, v in streamed.moved_bytes().items() if k != "cpu" and v}
    assert moved == {k: v for k, v in program.bytes_by_stream().items() if v}


@pytest.mark.parametrize("seed", range(6))
def test_the_peak_stays_within_what_the_program_says(family, seed, make_model, facts_of, random_policy, make_batch):
    facts = facts_of(family)
    policy = random_policy(facts, seed)
    promised = lower(policy, facts).peak_bytes("gpu")
    budget = Emulated(memory_bytes=promised)  # one byte more and the emulated GPU is out of memory
    batch = make_batch()
    with stream(make_model(family), policy, device=budget, facts=facts) as streamed:
        for _ in range(2):
            streamed.model(**batch).loss.backward()
        streamed.gradients()
        assert 0.7 * promised <= streamed.device.peak_bytes <= promised
