"""Plans of jobs that share a node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.schedulers.demand import demand
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.options import Planned, option
from lazytrain.schedulers.placement import Gpu, NodeState, Option
from lazytrain.schedulers.planner import plan
from lazytrain.schedulers.together import plan_together

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]


def answer(facts: ModelFacts, profile: HardwareProfile, planner: str = "every_layer") -> Planned:
    return facts, plan(facts, profile, planner=planner, solve_seconds=2)


def asked_by(planned: Planned) -> Option:
    """The option of a plan, for a job that runs by it."""
    facts, made = planned
    assert made.policy is not None
    return option(demand(made.policy, facts, made.predicted), kind="round", work_tokens=0)


def node(**links: float) -> NodeState:
    return NodeState(name="n", kind="round", gpus=(Gpu(id="0"), Gpu(id="1")), host_bytes=8 << 30, **links)


def test_plans_that_share_a_full_link_are_made_for_their_part_of_it(make_facts: Make, make_profile: Machine) -> None:
    """Alone, swapping internals over PCIe beats recomputing; where two jobs share the link it does not pay."""
    facts = make_facts(6, boundary=MIB, parameters=MIB // 8, flops=2e9, workspace=MIB)
    profile = make_profile(gpu_memory_bytes=40 * MIB, h2d_bytes_s=4e9, d2h_bytes_s=4e9)
    jobs = [partial(answer, facts, planner="full")] * 2
    apart = plan_together(jobs, [profile] * 2, node(), ["a", "b"])
    assert apart.speeds == (1.0, 1.0)
    tight = node(pcie_bytes_s=1e9)
    alone = [partial(fixed, jobs[0](profile))] * 2
    kept = plan_together(alone, [profile] * 2, tight, ["a", "a"])
    again = plan_together(jobs, [profile] * 2, tight, ["a", "a"])
    assert min(kept.speeds) < 1.0
    assert min(again.tokens_per_s) > 1.02 * min(kept.tokens_per_s)


def fixed(planned: Planned, _: HardwareProfile) -> Planned:
    """A planner that does not react to the machine."""
    return planned


def test_a_job_that_does_not_fit_is_no_neighbour(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(4)
    small = make_profile(host_memory_bytes=8 * MIB)
    joint = plan_together([partial(answer, facts)] * 2, [small] * 2, node(), ["a", "a"])
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
    joint = plan_together([job] * 2, [profile] * 2, small, ["a", "b"])
    assert joint.feasible and joint.speeds == (1.0, 1.0)
    taken = [planned.predicted.peak_host_bytes for _, planned in joint.planned if planned.predicted]
    assert sum(taken) <= small.host_bytes
    assert joint.tokens_per_s < (alone.tokens_per_s,) * 2


def test_two_jobs_that_a_node_cannot_hold_are_told_what_is_short(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(4), make_profile()
    small = NodeState(name="n", kind="round", gpus=(Gpu(id="0"), Gpu(id="1")), host_bytes=12 * facts.parameters)
    joint = plan_together([partial(answer, facts)] * 2, [profile] * 2, small, ["a", "b"])
    assert not joint.feasible and joint.speeds == (0.0, 0.0)
    assert {reason.resource for _, planned in joint.planned for reason in planned.reasons} == {"host_memory"}


def test_a_job_that_starts_beside_another_is_planned_for_what_that_leaves(
    make_facts: Make, make_profile: Machine
) -> None:
    """The running one keeps its plan; both are promised what they reach together, and the worse of the two is better
    off than if the new one had come with the plan that it has alone."""
    facts = make_facts(6, boundary=MIB, parameters=MIB // 8, flops=2e9, workspace=MIB)
    profile = make_profile(gpu_memory_bytes=40 * MIB, h2d_bytes_s=4e9, d2h_bytes_s=4e9)
    job = partial(answer, facts, planner="full")
    alone = job(profile)
    tight = node(pcie_bytes_s=1e9)
    running = [(asked_by(alone), "a")]
    careless = plan_together([partial(fixed, alone)], [profile], tight, ["a"], running)
    careful = plan_together([job], [profile], tight, ["a"], running)
    assert min(*careless.speeds, *careless.beside) < 1.0
    assert careful.planned[0][1].policy != alone[1].policy
    assert careful.tokens_per_s[0] > 1.02 * careless.tokens_per_s[0]
    assert careful.beside[0] >= careless.beside[0]


def test_a_job_beside_another_takes_the_memory_that_is_left(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(6, boundary=MIB, parameters=MIB // 8, flops=2e9, workspace=MIB)
    profile = make_profile(gpu_memory_bytes=40 * MIB, h2d_bytes_s=4e9, d2h_bytes_s=4e9)
    job = partial(answer, facts, planner="full")
    taken = asked_by(job(profile))
    small = NodeState(name="n", kind="round", gpus=(Gpu(id="0"), Gpu(id="1")), host_bytes=taken.host_bytes * 3 // 2)
    joint = plan_together([job], [profile], small, ["b"], [(taken, "a")])
    predicted = joint.planned[0][1].predicted
    assert joint.feasible and predicted is not None
    assert predicted.peak_host_bytes <= small.host_bytes - taken.host_bytes < taken.host_bytes


def test_what_all_copies_share_is_shared_by_jobs_under_different_roots(make_facts: Make, make_profile: Machine) -> None:
    """As measured while all GPUs copied: each root could do more, the node's memory cannot."""
    facts = make_facts(6, boundary=MIB, parameters=MIB // 8, flops=2e9, workspace=MIB)
    profile = make_profile(gpu_memory_bytes=40 * MIB, h2d_bytes_s=4e9, d2h_bytes_s=4e9)
    jobs = [partial(fixed, answer(facts, profile, planner="full"))] * 2
    roomy = node(pcie_bytes_s=4e9, h2d_bytes_s=8e9, d2h_bytes_s=8e9, copies_bytes_s=16e9)
    assert plan_together(jobs, [profile] * 2, roomy, ["a", "b"]).speeds == (1.0, 1.0)
    for narrow in ({"h2d_bytes_s": 1e9}, {"d2h_bytes_s": 1e9}, {"copies_bytes_s": 2e9}):
        tight = node(pcie_bytes_s=4e9, **narrow)
        assert max(plan_together(jobs, [profile] * 2, tight, ["a", "b"]).speeds) < 0.97, narrow
        running = [(asked_by(jobs[0](profile)), "b")]
        assert plan_together(jobs[:1], [profile], tight, ["a"], running).speeds[0] < 0.97, narrow


def test_a_job_beside_nobody_reaches_what_its_plan_says(make_facts: Make, make_profile: Machine) -> None:
    """Even where its link is not the same in both directions, and all copies together get no more than one GPU does."""
    facts = make_facts(6, boundary=MIB, parameters=MIB // 8, flops=2e9, workspace=MIB)
    profile = make_profile(gpu_memory_bytes=40 * MIB, h2d_bytes_s=4e9, d2h_bytes_s=1e9)
    own = node(pcie_bytes_s=4e9, h2d_bytes_s=4e9, d2h_bytes_s=1e9, copies_bytes_s=5e9)
    joint = plan_together([partial(answer, facts, planner="full")], [profile], own, ["a"])
    assert joint.speeds == (1.0,)
