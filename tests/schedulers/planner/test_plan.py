"""The paper's plans: what is handed out fits, what is refused says by how much, equal questions get equal answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lazytrain.jobs.errors import InputError, LazytrainError
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import Policy, lower
from lazytrain.schedulers.baselines import every_layer, shortages
from lazytrain.schedulers.costs import state_bytes
from lazytrain.schedulers.hardware import Budgets, HardwareProfile
from lazytrain.schedulers.planner import Plan, Solution, search
from lazytrain.schedulers.planner import plan as plan_with
from lazytrain.schedulers.simulator import predict

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]
plan = partial(plan_with, planner="paper")


@pytest.fixture
def facts(make_facts: Make) -> ModelFacts:
    """16 layers whose compute hides about two boundaries each, with 8 MiB of working memory."""
    return make_facts(16, flops=5e9, workspace=8 * MIB)


def free_host(facts: ModelFacts, boundaries: int) -> int:
    """Host memory for the model's state and some boundaries."""
    return sum(state_bytes(facts).values()) + boundaries * MIB


def test_plans_fit_whatever_the_budgets(facts: ModelFacts, make_profile: Machine) -> None:
    profile = make_profile()
    homes = set()
    for gpu in (20, 24, 27, 40):
        for host, nvme in ((40, 0), (6, 0), (6, 20), (0, 0)):
            budgets = {"gpu_memory": gpu * MIB, "host_memory": free_host(facts, host), "nvme": nvme * MIB}
            answer = plan(facts, profile, **budgets)
            if not answer.feasible:
                assert answer.reasons and answer.policy is None
                continue
            assert answer.policy and answer.solver and answer.predicted
            assert answer.solver.status == "OPTIMAL" and answer.solver.gap == pytest.approx(0.0, abs=1e-6)
            assert shortages(answer.policy, facts, Budgets.of(profile, **budgets)) == []
            assert answer.predicted == predict(answer.policy, facts, profile) == answer.policy.predicted
            assert answer.predicted.peak_gpu_bytes <= gpu * MIB
            homes |= set(answer.policy.homes)
    assert homes == {"gpu", "host", "nvme", "recompute"}


@pytest.mark.parametrize("host", [0, 4, 40])
def test_more_gpu_memory_is_never_slower(facts: ModelFacts, make_profile: Machine, host: int) -> None:
    last = float("inf")
    for gpu in range(22 * MIB, 36 * MIB, 2 * MIB):
        answer = plan(facts, make_profile(), gpu_memory=gpu, host_memory=free_host(facts, host))
        objective_s = answer.solver.objective_s if answer.solver else float("inf")
        assert objective_s is not None and objective_s <= last
        last = objective_s
    assert last < 1e-3


def test_equal_questions_get_byte_equal_policies(facts: ModelFacts, make_profile: Machine) -> None:
    question: dict[str, Any] = {"gpu_memory": 24 * MIB, "host_memory": free_host(facts, 6), "nvme": 8 * MIB}
    first, second = (plan(facts, make_profile(), **question).policy for _ in range(2))
    assert first and second and first.to_json() == second.to_json()
    assert first.model_digest == facts.digest and first.hardware_digest == make_profile().digest
    assert "seconds" not in json.loads(first.to_json())["certificate"]


def test_backends_agree(facts: ModelFacts, make_profile: Machine) -> None:
    answers = [plan(facts, make_profile(), gpu_memory=24 * MIB, backend=name).solver for name in ("highs", "gscip")]
    assert answers[0] and answers[1]
    assert answers[0].objective_s == pytest.approx(answers[1].objective_s, rel=1e-6)
    assert [answer.backend for answer in answers if answer] == ["HIGHS", "GSCIP"]


def test_the_answer_prints_as_promised(facts: ModelFacts, make_profile: Machine) -> None:
    answer = plan(facts, make_profile(), accumulation=2).to_dict()
    assert set(answer) == {"feasible", "solver", "policy", "predicted", "baselines", "notes"}
    solver = {"planner", "backend", "status", "objective_s", "bound_s", "gap", "seconds", "cpu_seconds", "out_of_time"}
    assert set(answer["solver"]) == solver
    assert {"schema", "model_digest", "hardware_digest", "micro_batch", "accumulation"} <= set(answer["policy"])
    assert answer["policy"]["accumulation"] == 2
    assert answer["policy"]["boundaries"][0] == {"index": 0, "home": "gpu"}
    assert {"step_s", "tokens_per_s", "tflops_6n", "compute_units", "exposed_s"} <= set(answer["predicted"])
    assert set(answer["baselines"]) == {"megatrain", "every_layer", "keep_all"}
    assert Policy.model_validate(answer["policy"]).homes == ("gpu",) * 17
    json.dumps(answer, allow_nan=False)


def test_a_gpu_too_small_is_refused_to_the_byte(facts: ModelFacts, make_profile: Machine) -> None:
    answer = plan(facts, make_profile(), gpu_memory=10 * MIB).to_dict()
    assert answer["feasible"] is False and set(answer) == {"feasible", "reasons", "changes"}
    (reason,) = answer["reasons"]
    assert reason["resource"] == "gpu_memory" and "GPU memory" in reason["hint"]
    assert reason["shortfall_bytes"] == reason["needed_bytes"] - 10 * MIB
    assert plan(facts, make_profile(), gpu_memory=reason["needed_bytes"]).feasible
    assert not plan(facts, make_profile(), gpu_memory=reason["needed_bytes"] - 1).feasible


def test_a_host_too_small_for_the_state_is_refused_to_the_byte(facts: ModelFacts, make_profile: Machine) -> None:
    answer = plan(facts, make_profile(), host_memory=MIB)
    (reason,) = answer.reasons
    assert (reason.resource, reason.needed_bytes) == ("host_memory", free_host(facts, 0))
    assert "host memory" in reason.hint
    assert plan(facts, make_profile(), host_memory=reason.needed_bytes).feasible
    assert not plan(facts, make_profile(), host_memory=reason.needed_bytes - 1).feasible


def test_both_too_small_gives_both_reasons(facts: ModelFacts, make_profile: Machine) -> None:
    answer = plan(facts, make_profile(), gpu_memory=10 * MIB, host_memory=MIB)
    assert [reason.resource for reason in answer.reasons] == ["gpu_memory", "host_memory"]


def test_when_several_changes_help_each_is_enough_alone(facts: ModelFacts, make_profile: Machine) -> None:
    budgets: dict[str, Any] = {"gpu_memory": 24 * MIB, "host_memory": free_host(facts, 0), "nvme": MIB}
    answer = plan(facts, make_profile(), **budgets)
    names = {"gpu_memory": "gpu_memory", "host_memory": "host_memory", "nvme": "nvme"}
    assert len(answer.reasons) >= 2
    for reason in answer.reasons:
        assert reason.shortfall_bytes > 0 and "any one" in reason.hint
        assert plan(facts, make_profile(), **(budgets | {names[reason.resource]: reason.needed_bytes})).feasible


def test_nvme_is_used_only_where_the_host_has_room_for_its_staging(facts: ModelFacts, make_profile: Machine) -> None:
    budgets: dict[str, Any] = {"gpu_memory": 24 * MIB, "nvme": 100 * MIB}
    roomy = plan(facts, make_profile(), host_memory=free_host(facts, 6), **budgets)
    tight = plan(facts, make_profile(), host_memory=free_host(facts, 1), **budgets)
    assert roomy.policy and roomy.policy.count_homes()["nvme"] > 0
    assert not tight.policy or tight.policy.count_homes()["nvme"] == 0


def stub(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    """Let the solver answer with ``status``: without a solution, or with the one it has, unproven."""
    real = search.solve

    def solve(*args: Any, **kwargs: Any) -> Solution:
        if status == "NO_SOLUTION":
            return Solution("NO_SOLUTION", seconds=1.0)
        solution = real(*args, **kwargs)
        return Solution("FEASIBLE", solution.homes, solution.objective_s, 0.0, 1.0)

    monkeypatch.setattr(search, "solve", solve)


def test_out_of_time_with_an_incumbent_gives_it_with_its_gap(
    facts: ModelFacts, make_profile: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(monkeypatch, "FEASIBLE")
    answer = plan(facts, make_profile(), nvme=MIB)
    assert answer.solver and answer.solver.status == "FEASIBLE" and answer.solver.gap == 1.0


@pytest.mark.parametrize("gpu", [40, 26, 24])
def test_out_of_time_with_nothing_falls_back_to_a_rule_that_fits(
    facts: ModelFacts, make_profile: Machine, monkeypatch: pytest.MonkeyPatch, gpu: int
) -> None:
    stub(monkeypatch, "NO_SOLUTION")
    profile = make_profile()
    answer = plan(facts, profile, gpu_memory=gpu * MIB)
    assert answer.feasible and answer.solver and answer.policy
    assert answer.solver.status == "FALLBACK"
    assert answer.policy.certificate and answer.policy.certificate.status == "FALLBACK"
    assert answer.policy.homes == every_layer(facts, profile, gpu_memory=gpu * MIB).homes
    assert lower(answer.policy, facts).peak_bytes("gpu") <= gpu * MIB


def test_out_of_time_is_never_called_infeasible(
    facts: ModelFacts, make_profile: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(monkeypatch, "NO_SOLUTION")
    with pytest.raises(LazytrainError, match="in the time it had"):
        plan(facts, make_profile(), gpu_memory=20 * MIB, host_memory=free_host(facts, 0))


@pytest.mark.parametrize("planner", ["megatrain", "every_layer"])
def test_rules_are_planners_too(facts: ModelFacts, make_profile: Machine, planner: str) -> None:
    answer = plan(facts, make_profile(), planner=planner)
    assert answer.solver and answer.solver.planner == planner and answer.solver.status == "RULE"
    assert answer.predicted == answer.baselines[planner]
    refused = plan(facts, make_profile(), planner=planner, gpu_memory=10 * MIB)
    assert [reason.resource for reason in refused.reasons] == ["gpu_memory"]


@pytest.mark.parametrize(
    "question", [{"planner": "magic"}, {"backend": "cplex"}, {"accumulation": 0}, {"nvme": "lots"}]
)
def test_wrong_questions_are_refused(facts: ModelFacts, make_profile: Machine, question: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        plan(facts, make_profile(), **question)
    if "planner" in question:
        assert "full" in caught.value.hint and "every_layer" in caught.value.hint


def test_200_layers_are_planned_in_the_time_that_there_is(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(200, flops=5e9, workspace=8 * MIB)
    answer = plan(facts, make_profile(host_memory_bytes=1 << 40), gpu_memory=80 * MIB, nvme=20 * MIB)
    assert answer.feasible and answer.solver and not answer.solver.out_of_time


def test_a_plan_survives_its_json(facts: ModelFacts, make_profile: Machine) -> None:
    answer = plan(facts, make_profile())
    assert Plan.model_validate_json(answer.model_dump_json(by_alias=True)) == answer
