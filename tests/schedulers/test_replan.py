"""A new plan when rates have drifted: not before, only where it helps, and for the machine as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import LayerPolicy, Policy
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.planner import plan
from lazytrain.schedulers.replan import Calibration, Measured, replan
from lazytrain.schedulers.simulator import simulate

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]


def test_a_link_that_slowed_down_gets_another_policy(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(12, flops=5e9, workspace=8 * MIB)
    fast = make_profile(gpu_memory_bytes=75 * MIB, h2d_bytes_s=2e10, d2h_bytes_s=2e10)
    slow = fast.model_copy(update={"h2d_bytes_s": 1e9, "d2h_bytes_s": 1e9})
    policy = plan(facts, fast).policy
    assert policy
    measured = Measured.of([simulate(policy, facts, slow)] * 2, policy, facts, fast)
    assert measured.drifted() == pytest.approx({"h2d": 0.05, "d2h": 0.05})
    new = replan(policy, facts, fast, measured)
    assert new and new.answer and new.answer.policy and new.answer.predicted
    assert new.profile.h2d_bytes_s == pytest.approx(1e9)
    assert new.profile.update_parameters_s == pytest.approx(fast.update_parameters_s)
    assert new.old_step_s == pytest.approx(simulate(policy, facts, slow).step_s)
    assert new.new_step_s == new.answer.predicted.step_s < 0.9 * new.old_step_s
    assert f"{new.gain:.1%} less" in new.words and "h2d at 0.05" in new.words


def test_nothing_is_planned_while_rates_hold(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(6), make_profile()
    policy = plan(facts, profile, planner="every_layer").policy
    assert policy
    near = profile.model_copy(update={"h2d_bytes_s": 1.1e9, "matmul_flops": {"bfloat16": 0.9e12}})
    measured = Measured.of([simulate(policy, facts, near)], policy, facts, profile)
    assert measured.speeds["h2d"] == pytest.approx(1.1) and measured.speeds["compute"] == pytest.approx(0.9)
    assert replan(policy, facts, profile, measured) is None


def test_a_drift_that_no_policy_helps_keeps_the_policy(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(6, flops=5e9), make_profile()
    answer = plan(facts, profile)
    assert answer.policy
    new = replan(answer.policy, facts, profile, Measured({"compute": 0.5, "cpu": 0.8}))
    assert new and new.answer is None and "no other policy" in new.words
    assert new.profile.flops("bfloat16") == profile.flops("bfloat16") / 2


def test_calibration_finds_the_machine_that_was_measured(make_facts: Make, make_profile: Machine) -> None:
    facts, believed = make_facts(6, flops=5e9), make_profile()
    truth = believed.model_copy(
        update={
            "matmul_flops": {"bfloat16": 0.4e12},
            "backward_forwards": 1.7,
            "reforward_matmuls": 0.31,
            "h2d_bytes_s": 0.7e9,
            "update_parameters_s": 2e9,
            "host_bytes_s": 2e10,
        }
    )
    made = Policy.from_homes(facts, ["gpu"] * 7)
    kinds = ("none", "matmuls", "all") * 2
    probe = made.model_copy(
        update={"layers": tuple(LayerPolicy(index=i, internals=kind) for i, kind in enumerate(kinds))}  # type: ignore[arg-type]
    )
    measured = Measured.of([simulate(probe, facts, truth)] * 3, probe, facts, believed)
    found = measured.calibrated(believed)
    other = Policy.from_homes(facts, ["gpu", "recompute", "host", "gpu", "host", "gpu", "gpu"])
    for policy in (probe, made, other):
        assert simulate(policy, facts, found).step_s == pytest.approx(simulate(policy, facts, truth).step_s, rel=1e-6)


def test_an_update_that_ran_before_its_step_was_recorded_is_no_faster_cpu(
    make_facts: Make, make_profile: Machine
) -> None:
    facts, profile = make_facts(6), make_profile()
    policy = Policy.from_homes(facts, ["gpu"] * 7)
    step = simulate(policy, facts, profile)
    step.spans = [span for span in step.spans if not span.op.startswith("update")]
    assert Measured.of([step], policy, facts, profile).speeds["cpu"] == pytest.approx(1.0)


def test_a_calibration_says_how_far_off_the_prediction_was_and_is(make_facts: Make, make_profile: Machine) -> None:
    facts, believed = make_facts(6, flops=5e9), make_profile()
    policy = plan(facts, believed, planner="every_layer").policy
    assert policy and policy.predicted
    steps = [simulate(policy, facts, believed.model_copy(update={"efficiency": share})) for share in (0.5, 0.4, 0.1)]
    found = Calibration.of(steps, policy, facts, Measured.of(steps, policy, facts, believed).calibrated(believed))
    assert found and (found.steps, found.measured_s) == (3, steps[1].step_s)
    assert found.predicted_s == policy.predicted.step_s < found.measured_s
    assert f"{found.measured_s / found.predicted_s - 1:.1%} more than was predicted" in found.words
    assert Calibration.of(steps, Policy.from_homes(facts, ["gpu"] * 7), facts, believed) is None
