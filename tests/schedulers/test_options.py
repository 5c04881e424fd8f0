"""From the planner's answers to what placement chooses among."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.options import Planned, options, plan_together
from lazytrain.schedulers.placement import Gpu, NodeState
from lazytrain.schedulers.planner import plan

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]


def answer(facts: ModelFacts, profile: HardwareProfile, planner: str = "every_layer") -> Planned:
    return facts, plan(facts, profile, planner=planner, solve_seconds=2)


def test_one_option_per_kind_that_fits_and_words_for_the_rest(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(4)
    machines = {"large": make_profile(kind="large"), "small": make_profile(kind="small", host_memory_bytes=8 * MIB)}
    found = options(1e6, machines, partial(answer, facts), startup_s=30.0)
    assert [option.kind for option in found.options] == ["large"]
    option = found.options[0]
    assert option.seconds == pytest.approx(30.0 + 1e6 / option.tokens_per_s)
    assert option.host_bytes > 8 * facts.parameters
    assert found.limits["small"].startswith("needs ")
    assert found.limits["small"].endswith("of host memory, has 8.0MiB")


def test_a_job_is_planned_for_its_part_of_the_host_memory_first(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(4)
    state = 9 * facts.parameters
    seen: list[int] = []

    def plan_on(profile: HardwareProfile) -> Planned:
        seen.append(profile.host_memory_bytes)
        return answer(facts, profile)

    for memory in (8 * state, 2 * state):
        options(1.0, {"k": make_profile(host_memory_bytes=memory)}, plan_on, gpus={"k": 4})
    assert seen == [2 * state, state // 2, 2 * state]


def node(**links: float) -> NodeState:
    return NodeState(name="n", kind="round", gpus=(Gpu(id="0"), Gpu(id="1")), host_bytes=8 << 30, **links)


def test_plans_that_share_a_full_link_are_made_for_their_part_of_it(make_facts: Make, make_profile: Machine) -> None:
    """Alone, swapping internals over PCIe beats recomputing; where two jobs share the link it does not pay."""
    facts = make_facts(6, boundary=MIB, parameters=MIB // 8, flops=2e9, workspace=MIB)
    profile = make_profile(gpu_memory_bytes=40 * MIB, h2d_bytes_s=4e9, d2h_bytes_s=4e9)
    jobs = [partial(answer, facts, planner="full")] * 2
    apart = plan_together(jobs, profile, node(), ["a", "b"])
    assert apart.speeds == (1.0, 1.0)
    tight = node(pcie_bytes_s=1e9)
    alone = [partial(fixed, jobs[0](profile))] * 2
    kept = plan_together(alone, profile, tight, ["a", "a"])
    again = plan_together(jobs, profile, tight, ["a", "a"])
    assert min(kept.speeds) < 1.0
    assert min(again.tokens_per_s) > 1.02 * min(kept.tokens_per_s)


def fixed(planned: Planned, _: HardwareProfile) -> Planned:
    """A planner that does not react to the machine."""
    return planned


def test_a_job_that_does_not_fit_is_no_neighbour(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(4)
    small = make_profile(host_memory_bytes=8 * MIB)
    joint = plan_together([partial(answer, facts)] * 2, small, node(), ["a", "a"])
    assert joint.speeds == (0.0, 0.0)
    assert joint.tokens_per_s == (0.0, 0.0)


def test_host_memory_too_small_for_both_is_divided(make_facts: Make, make_profile: Machine) -> None:
    """Each alone would swap to the host; together they swap less, and fit."""
    facts = make_facts(6, boundary=MIB, parameters=MIB // 8, flops=2e9, workspace=MIB)
    profile = make_profile(gpu_memory_bytes=40 * MIB, h2d_bytes_s=4e9, d2h_bytes_s=4e9)
    job = partial(answer, facts, planner="full")
    alone = job(profile)[1].predicted
    assert alone is not None
    small = NodeState(
        name="n", kind="round", gpus=(Gpu(id="0"), Gpu(id="1")), host_bytes=alone.peak_host_bytes * 3 // 2
    )
    joint = plan_together([job] * 2, profile, small, ["a", "b"])
    assert joint.feasible and joint.speeds == (1.0, 1.0)
    taken = [planned.predicted.peak_host_bytes for _, planned in joint.planned if planned.predicted]
    assert sum(taken) <= small.host_bytes
    assert joint.tokens_per_s < (alone.tokens_per_s,) * 2


def test_two_jobs_that_a_node_cannot_hold_are_told_what_is_short(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(4), make_profile()
    small = NodeState(name="n", kind="round", gpus=(Gpu(id="0"), Gpu(id="1")), host_bytes=12 * facts.parameters)
    joint = plan_together([partial(answer, facts)] * 2, profile, small, ["a", "b"])
    assert not joint.feasible and joint.speeds == (0.0, 0.0)
    assert {reason.resource for _, planned in joint.planned for reason in planned.reasons} == {"host_memory"}
