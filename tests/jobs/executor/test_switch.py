"""Another policy between two steps: the same bits, and each policy's own memory."""

from __future__ import annotations

import pytest

from lazytrain.jobs.errors import OutOfMemory, ProgramError
from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy, lower

STEPS = 6
ROOMY = Emulated(memory_bytes=1 << 30)


def curve(model, facts, policies, make_batch, device=ROOMY):
    """Losses, norms and weights of a training that carries out one policy after the other, a step each."""
    optimizer = HybridAdamW(lr=1e-3, max_grad_norm=0.5)
    seen = []
    with stream(model, policies[0], device=device, optimizer=optimizer, facts=facts, debug=True) as streamed:
        for step, policy in enumerate(policies):
            if policy is not streamed.policy:
                streamed.switch(policy)
            streamed.device.reset_peak()
            loss = streamed.model(**make_batch(step)).loss
            loss.backward()
            seen.append((loss.item(), streamed.step().grad_norm))
            streamed.flush()
            assert streamed.device.peak_bytes <= lower(policy, facts).peak_bytes("gpu")
        return seen, streamed.state_dict()


@pytest.mark.parametrize("parked", [{}, {"optimizer": {1, 3}, "gradients": {2}}])
def test_a_training_with_changing_policies_has_the_bits_of_one_without(
    family, parked, make_model, facts_of, random_policy, make_batch
):
    facts = facts_of(family)
    policies = [random_policy(facts, seed).parked(**parked) for seed in range(STEPS)]
    losses, weights = curve(make_model(family), facts, [policies[0]] * STEPS, make_batch)
    switched, switched_weights = curve(make_model(family), facts, policies, make_batch)
    assert switched == losses
    assert all(weights[name].equal(switched_weights[name]) for name in weights)


def test_a_policy_without_room_changes_nothing(make_model, facts_of, make_batch):
    facts = facts_of("qwen2")
    small = Policy.from_homes(facts, ["host"] * 5 + ["gpu"])
    large = small.model_copy(update={"weight_slots": 40})
    device = Emulated(memory_bytes=lower(small, facts).peak_bytes("gpu"))
    plain, _ = curve(make_model("qwen2"), facts, [small] * 2, make_batch, device)
    optimizer = HybridAdamW(lr=1e-3, max_grad_norm=0.5)
    with stream(make_model("qwen2"), small, device=device, optimizer=optimizer, facts=facts) as streamed:
        for step in range(2):
            with pytest.raises(OutOfMemory, match="gpu"):
                streamed.switch(large)
            assert streamed.policy is small
            loss = streamed.model(**make_batch(step)).loss
            loss.backward()
            assert (loss.item(), streamed.step().grad_norm) == plain[step]


def test_policies_that_cannot_follow_are_refused(make_model, facts_of):
    facts, other = facts_of("qwen2"), facts_of("gpt2")
    policy = Policy.from_homes(facts, ["host"] * 5 + ["gpu"])
    with stream(make_model("qwen2"), policy, device=ROOMY, optimizer=HybridAdamW(), facts=facts) as streamed:
        with pytest.raises(ProgramError, match="was made for model"):
            streamed.switch(Policy.from_homes(other, ["host"] * 5 + ["gpu"]))
        with pytest.raises(ProgramError, match="other layers on NVMe"):
            streamed.switch(policy.parked(optimizer={1}))
        assert streamed.policy is policy
