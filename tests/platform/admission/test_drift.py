"""Planning again for what a run measured: the simulator stands for the machine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.admission import drift
from lazytrain.platform.admission.measuring import Here
from lazytrain.platform.demo.machine import base_profile
from lazytrain.schedulers.planner import Plan, plan
from lazytrain.schedulers.replan import Replan
from lazytrain.schedulers.simulator import simulate

GIB = 1 << 30
NOTHING = {"policy": None, "tokens_per_s": 0.0}
PLANNED = base_profile().model_copy(update={"gpu_memory_bytes": GIB, "host_memory_bytes": 8 * GIB})
HALF = PLANNED.model_copy(update={"h2d_bytes_s": PLANNED.h2d_bytes_s / 2})


@pytest.fixture
def facts(tiny_job: Path, tmp_path: Path) -> ModelFacts:
    return Here(tmp_path / "facts").facts(load_spec(tiny_job), batch=4, length=32, dtype="float32")


@pytest.fixture
def policy(facts: ModelFacts) -> Policy:
    found = plan(facts, PLANNED, planner="every_layer").policy
    assert found is not None
    return found


@pytest.fixture
def ask(tiny_job: Path, tmp_path: Path, facts: ModelFacts, policy: Policy) -> Callable[..., dict[str, Any]]:
    """What is answered when the policy runs on ``real``."""

    def ask(real: Any) -> dict[str, Any]:
        steps = tmp_path / "steps.json"
        steps.write_text(json.dumps({"steps": [simulate(policy, facts, real).to_dict()] * 3}))
        asked = {
            "spec": load_spec(tiny_job, ("plan.nvme=null", "plan.planner=every_layer")).model_dump(mode="json"),
            "policy": policy.model_dump(mode="json", by_alias=True),
            "profile": PLANNED.model_dump(mode="json"),
            "gpu_bytes": 5 << 20,
            "steps": str(steps),
        }
        return drift.plan_for_drift(asked, Here(tmp_path / "facts"))

    return ask


def test_a_machine_as_planned_needs_no_other_plan(ask: Any) -> None:
    found = ask(PLANNED)
    assert found == {"words": "", "calibration": found["calibration"], **NOTHING}
    assert found["calibration"]["measured_s"] == pytest.approx(found["calibration"]["predicted_s"])


def test_a_drift_that_no_policy_helps_is_only_said(ask: Any) -> None:
    found = ask(HALF)
    assert found["words"].startswith("h2d at 0.50 of its planned rate: no other policy saves")
    assert found == {"words": found["words"], "calibration": found["calibration"], **NOTHING}


def test_how_far_off_the_prediction_was_and_is(ask: Any, policy: Policy, facts: ModelFacts) -> None:
    slow = PLANNED.model_copy(update={"h2d_bytes_s": PLANNED.h2d_bytes_s / 500, "efficiency": PLANNED.efficiency / 2})
    calibration = ask(slow)["calibration"]
    assert policy.predicted is not None and calibration["predicted_s"] == policy.predicted.step_s
    measured_s = simulate(policy, facts, slow).step_s
    assert (calibration["steps"], calibration["measured_s"]) == (3, pytest.approx(measured_s))
    assert calibration["calibrated_s"] == pytest.approx(measured_s, rel=1e-3)
    share = measured_s / policy.predicted.step_s - 1
    assert share > 0.1 and f"{share:.1%} more than was predicted, and 0.0%" in calibration["sentence"]


def test_a_new_policy_takes_no_more_memory_than_the_old_one(
    ask: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    new = policy.model_copy(update={"weight_slots": 3})

    def replanned(*_: Any, **options: Any) -> Replan:
        given.update(options)
        return Replan(Plan(feasible=True, policy=new), HALF, old_step_s=4.0, new_step_s=2.0, words="half the time")

    monkeypatch.setattr(drift, "replan", replanned)
    found = ask(HALF)
    assert Policy.model_validate(found["policy"]) == new
    assert (found["words"], found["tokens_per_s"]) == ("half the time", 4 * 32 / 2.0)
    assert policy.predicted is not None
    assert (given["gpu_memory"], given["host_memory"]) == (5 << 20, policy.predicted.peak_host_bytes)
    assert (given["nvme"], given["planner"]) == (0, "every_layer")
    new = policy.parked(optimizer={0})
    found = ask(HALF)  # its state would have to move
    assert found == {"words": "half the time", "calibration": found["calibration"], **NOTHING}
