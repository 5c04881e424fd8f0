"""Whole optimizer steps: against plain AdamW, and when something goes wrong."""

from __future__ import annotations

import math

import pytest
import torch

from lazytrain.jobs.errors import NonFiniteGradient, OutOfMemory, ProgramError
from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy, lower

STEPS = {1: 20, 3: 8}
"""By accumulation."""
HOMES = ["host", "recompute", "gpu", "nvme", "recompute", "gpu"]


def plain_adamw(model, lr, weight_decay):
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_loss_curve_equals_that_of_plain_adamw(family, accumulation, make_model, facts_of, make_batch):
    lr, facts = 2e-4, facts_of(family)
    plain, model = (make_model(family, seed=1, dropout=False) for _ in range(2))
    reference = plain_adamw(plain, lr, 0.1)
    optimizer = HybridAdamW(lr=lr, weight_decay=0.1, max_grad_norm=0.5, state_bits=32)
    policy = Policy.from_homes(facts, HOMES, accumulation=accumulation)
    clipped = 0
    with stream(model, policy, device=Emulated(memory_bytes=1 << 30), optimizer=optimizer, facts=facts) as streamed:
        for step in range(STEPS[accumulation]):
            batches = [make_batch(100 * step + i) for i in range(accumulation)]
            count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
            loss = 0.0
            for batch in batches:
                out = streamed.model(**batch, num_items_in_batch=count).loss
                out.backward()
                loss += out.item()
            result = streamed.step()
            reference.zero_grad()
            wanted = sum(plain(**b, use_cache=False, num_items_in_batch=count).loss for b in batches)
            wanted.backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()
            reference.step()
            assert loss == pytest.approx(wanted.item(), rel=1e-6)
            assert result.grad_norm == pytest.approx(norm, rel=1e-5)
            clipped += result.clip_scale < 1
        weights = streamed.state_dict()
    assert clipped > 0
    for name, parameter in plain.named_parameters():
        assert torch.allclose(weights[name], parameter, rtol=1e-4, atol=1e-6), name


def test_generate_gives_the_tokens_of_the_plain_model(family, make_model, facts_of, make_batch):
    model, facts = make_model(family).eval(), facts_of(family)
    prompt = make_batch()["input_ids"][:, :6]
    mask = torch.ones_like(prompt)
    prompt[0, :2], mask[0, :2] = 2, 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(prompt, **options)
    with stream(model, Policy.from_homes(facts, HOMES), device="cpu", facts=facts) as streamed:
        assert torch.equal(streamed.model.generate(prompt, **options), wanted)


def training(model, facts, device="cpu", **options):
    optimizer = HybridAdamW(**{"lr": 1e-3, "max_grad_norm": 1.0, **options})
    return stream(model, Policy.from_homes(facts, HOMES), device=device, optimizer=optimizer, facts=facts)


def test_a_gradient_that_is_not_finite_changes_nothing_and_three_end_the_run(make_model, facts_of, make_batch):
    facts, batch = facts_of("qwen2"), make_batch()
    with training(make_model("qwen2"), facts) as streamed:
        streamed.model(**batch).loss.backward()
        streamed.step()
        before = {name: {k: t.clone() for k, t in state.items()} for name, state in streamed.unit_states()}
        for attempt in range(3):
            (math.nan * streamed.model(**batch).loss).backward()
            if attempt < 2:
                assert streamed.step().skipped
        with pytest.raises(NonFiniteGradient, match=r"3 steps in a row .*the backward met it first in lm_head"):
            streamed.step()
        for name, state in streamed.unit_states():
            assert all(torch.equal(t, before[name][k]) for k, t in state.items()), name


def test_passing_the_memory_budget_ends_the_step_and_leaves_the_weights(make_model, facts_of, make_batch):
    facts, batch = facts_of("llama"), make_batch()
    promised = lower(Policy.from_homes(facts, HOMES), facts).peak_bytes("gpu")
    model = make_model("llama")
    with training(model, facts, device=Emulated(memory_bytes=int(0.7 * promised))) as streamed:
        before = streamed.state_dict()
        for _ in range(2):  # the second try finds the engine as clean as the first
            with pytest.raises(OutOfMemory) as caught:
                streamed.model(**batch).loss.backward()
        assert caught.value.tier == "gpu"
        assert caught.value.used_bytes + caught.value.requested_bytes > caught.value.budget_bytes
        after = streamed.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_step_before_backward_is_refused(make_model, facts_of, make_batch):
    facts = facts_of("qwen3")
    with training(make_model("qwen3"), facts) as streamed:
        with pytest.raises(ProgramError, match="step\\(\\) came before"):
            streamed.step()
        streamed.model(**make_batch())
        with pytest.raises(ProgramError, match="step\\(\\) came before"):
            streamed.step()


def test_a_step_counts_once(make_model, facts_of, make_batch):
    facts = facts_of("qwen3")
    with training(make_model("qwen3"), facts) as streamed:
        streamed.model(**make_batch()).loss.backward()
        streamed.step()
        with pytest.raises(ProgramError, match="step\\(\\) came before"):
            streamed.step()


def test_evaluating_between_steps_is_right(make_model, facts_of, make_batch):
    facts, batch = facts_of("llama"), make_batch()
    with training(make_model("llama"), facts) as streamed:
        streamed.model(**batch).loss.backward()
        streamed.step()
        streamed.model.eval()
        with torch.no_grad():
            during = streamed.model(**batch).loss.item()
        plain = make_model("llama").eval()
        plain.load_state_dict(streamed.state_dict(), strict=False)
        assert during == pytest.approx(plain(**batch, use_cache=False).loss.item(), rel=1e-6)


def test_a_loss_of_ones_own_gets_logits_with_gradients(family, make_model, facts_of, make_batch):
    model, facts, batch = make_model(family, dropout=False), facts_of(family), make_batch()
    labels = batch.pop("labels")

    def loss_of(logits):
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    loss_of(model(**batch, use_cache=False).logits).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with training(model, facts) as streamed:
        loss_of(streamed.model(**batch).logits).backward()
        got = streamed.gradients()
        assert all(torch.equal(got[name], gradient) for name, gradient in wanted.items())
        assert not streamed.step().skipped


def test_a_policy_of_another_batch_or_model_is_refused(make_model, facts_of):
    policy = Policy.from_homes(facts_of("llama", rows=2), HOMES)
    with pytest.raises(ProgramError, match="made for model"):
        stream(make_model("llama"), policy, device="cpu", facts=facts_of("llama"))


def test_nothing_is_left_of_the_nvme_file_even_while_it_is_used(tmp_path, make_model, facts_of, make_batch):
    facts = facts_of("llama")
    policy = Policy.from_homes(facts, ["nvme"] * 5 + ["gpu"])
    with stream(make_model("llama"), policy, device="cpu", facts=facts, nvme_directory=tmp_path) as streamed:
        streamed.model(**make_batch()).loss.backward()
        assert list(tmp_path.iterdir()) == []


def test_a_timeline_has_every_operation_once(make_model, facts_of, make_batch):
    facts = facts_of("qwen3")
    device = Emulated(memory_bytes=1 << 30, h2d_bytes_s=50e6)
    with training(make_model("qwen3"), facts, device=device) as streamed:
        streamed.trace()
        streamed.model(**make_batch()).loss.backward()
        streamed.step()
        streamed.flush()
        timeline = streamed.timeline()
    program = lower(Policy.from_homes(facts, HOMES), facts)
    assert sorted(span.op for span in timeline.spans) == sorted(op.id for op in program.ops)
    for span in timeline.spans:
        if span.stream == "h2d":
            assert span.end_s - span.start_s >= span.bytes / 50e6
