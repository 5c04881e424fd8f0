"""Boundaries straight to NVMe: planned where the machine can and where it is no loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import Policy, lower
from lazytrain.schedulers.baselines import shortages
from lazytrain.schedulers.costs import host_traffic, state_bytes
from lazytrain.schedulers.hardware import Budgets, HardwareProfile
from lazytrain.schedulers.planner import plan
from lazytrain.schedulers.planner.direct import with_direct_nvme
from lazytrain.schedulers.planner.search import Question
from lazytrain.schedulers.simulator import simulate

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]


@pytest.fixture
def facts(make_facts: Make) -> ModelFacts:
    return make_facts(5, flops=5e9, workspace=8 * MIB)


def by_host(facts: ModelFacts) -> Policy:
    return Policy.from_homes(facts, ["nvme"] * 5 + ["gpu"])


def question(facts: ModelFacts, profile: HardwareProfile, **memory: int) -> Question:
    return Question(facts, profile, Budgets.of(profile, nvme=40 * MIB, **memory), 1, "highs", time.monotonic() + 60)


def test_the_direct_way_is_planned_where_the_machine_has_it(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(8, flops=5e9, workspace=8 * MIB), make_profile(gpudirect=True)
    budgets: dict[str, Any] = {
        "gpu_memory": 22 * MIB, "host_memory": sum(state_bytes(facts).values()) + 2 * MIB, "nvme": 40 * MIB,
    }  # fmt: skip
    answer = plan(facts, profile, **budgets)
    assert answer.policy and answer.predicted and answer.solver
    assert "nvme" in answer.policy.homes and answer.policy.direct_nvme
    assert shortages(answer.policy, facts, Budgets.of(profile, **budgets)) == []
    assert answer.predicted.step_s == pytest.approx(answer.solver.objective_s)
    assert answer.solver.gap is None  # the bound is that of the other way
    timeline = simulate(answer.policy, facts, profile)
    assert {"spill", "fetch"} <= {span.op.split(".")[0] for span in timeline.spans}


def test_it_is_left_out_where_the_machine_has_it_not(facts: ModelFacts, make_profile: Machine) -> None:
    policy = by_host(facts)
    assert with_direct_nvme(question(facts, make_profile(gpudirect=True)), policy).direct_nvme
    assert with_direct_nvme(question(facts, make_profile()), policy) == policy


def test_it_is_left_out_where_the_step_would_take_longer(facts: ModelFacts, make_profile: Machine) -> None:
    """A slow disk: what waits for it is better held in host buffers than on the GPU."""
    slow = make_profile(gpudirect=True, nvme_write_bytes_s=1e8, nvme_read_bytes_s=1e10)
    policy = by_host(facts)
    direct = policy.model_copy(update={"direct_nvme": True})
    assert simulate(direct, facts, slow).step_s > simulate(policy, facts, slow).step_s
    assert with_direct_nvme(question(facts, slow), policy) == policy


def test_it_is_left_out_where_it_does_not_fit(facts: ModelFacts, make_profile: Machine) -> None:
    profile, policy = make_profile(gpudirect=True), by_host(facts)
    direct = policy.model_copy(update={"direct_nvme": True})
    needed = [lower(each, facts).peak_bytes("gpu") for each in (policy, direct)]
    room = question(facts, profile, gpu_memory=needed[1])
    assert with_direct_nvme(room, policy) == direct
    assert with_direct_nvme(question(facts, profile, gpu_memory=needed[1] - 1), policy) == policy


def test_it_does_not_pass_through_the_memory_of_the_host(facts: ModelFacts, make_profile: Machine) -> None:
    both = (by_host(facts).model_copy(update={"direct_nvme": way}) for way in (False, True))
    longer, shorter = (host_traffic(lower(policy, facts), facts, make_profile()) for policy in both)
    assert longer - shorter == 4 * sum(facts.boundary_bytes[:5])  # out and in, each over two links
