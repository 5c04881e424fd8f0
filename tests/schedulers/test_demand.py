"""What a plan asks of its node, counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lazytrain.jobs.errors import InputError
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import lower
from lazytrain.schedulers.baselines import every_layer
from lazytrain.schedulers.costs import op_seconds
from lazytrain.schedulers.demand import demand
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.planner import plan
from lazytrain.schedulers.simulator import predict

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]


def test_rates_are_the_bytes_of_a_step_over_its_seconds(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(4, boundary=MIB, parameters=MIB), make_profile()
    policy = every_layer(facts, profile)
    predicted = predict(policy, facts, profile)
    asked = demand(policy, facts, predicted)
    ops = lower(policy, facts).ops
    up = sum(op.bytes for op in ops if op.kind in ("load", "reload"))
    down = sum(op.bytes for op in ops if op.kind in ("offload", "gradient"))
    norms = sum(op.bytes for op in ops if op.kind == "norm")
    assert asked.tokens_per_s == predicted.tokens_per_s
    assert asked.h2d_bytes_s * predicted.step_s == pytest.approx(up)
    assert asked.d2h_bytes_s * predicted.step_s == pytest.approx(down)
    assert asked.dram_bytes_s * predicted.step_s == pytest.approx(up + down + norms + 16 * facts.parameters)
    assert (asked.host_bytes, asked.nvme_bytes) == (predicted.peak_host_bytes, 0)


def test_no_link_is_asked_for_more_than_it_has(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(6, boundary=4 * MIB, flops=1e6), make_profile()
    answer = plan(facts, profile, planner="every_layer")
    assert answer.policy is not None
    asked = demand(answer.policy, facts)
    assert 0 < asked.h2d_bytes_s <= profile.h2d_bytes_s
    assert 0 < asked.d2h_bytes_s <= profile.d2h_bytes_s
    busy = sum(op_seconds(op, facts, profile) for op in lower(answer.policy, facts).ops if op.stream == "h2d")
    assert answer.predicted is not None
    assert asked.h2d_bytes_s == pytest.approx(profile.h2d_bytes_s * busy / answer.predicted.step_s)


def test_a_policy_that_nobody_priced_has_no_rates(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(), make_profile()
    with pytest.raises(InputError, match="no prediction"):
        demand(every_layer(facts, profile), facts)
