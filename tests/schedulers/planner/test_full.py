"""The full planner: what is handed out fits, is no slower than any rule, and says what was proven."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from ortools.math_opt.python import mathopt

from lazytrain.jobs.errors import LazytrainError
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import LayerPolicy, Policy
from lazytrain.jobs.units import parse_bytes
from lazytrain.schedulers.baselines import shortages
from lazytrain.schedulers.costs import state_bytes
from lazytrain.schedulers.hardware import Budgets, HardwareProfile
from lazytrain.schedulers.planner import Instance, full, programs
from lazytrain.schedulers.planner import first as first_policies
from lazytrain.schedulers.planner import plan as plan_with
from lazytrain.schedulers.planner.exact import Exact
from lazytrain.schedulers.planner.full import FAMILIES, Search
from lazytrain.schedulers.planner.loose import Family
from lazytrain.schedulers.planner.search import Attempt, OutOfTimeError, Question
from lazytrain.schedulers.simulator import simulate

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]
plan = partial(plan_with, solve_seconds=120.0)
"""The work that a search may do ends it long before, also on a machine that is busy with something else."""


@pytest.fixture
def facts(make_facts: Make) -> ModelFacts:
    """12 layers whose compute hides some traffic, with 8 MiB of working memory."""
    return make_facts(12, flops=5e9, workspace=8 * MIB)


def host_memory(facts: ModelFacts, boundaries: int) -> int:
    """Host memory for the model's state and some boundaries."""
    return sum(state_bytes(facts).values()) + boundaries * MIB


@pytest.mark.parametrize("gpu", [24, 30, 44, 400])
@pytest.mark.parametrize("host,nvme", [(0, 0), (6, 20), (400, 0)])
def test_a_plan_fits_and_no_rule_is_faster(
    facts: ModelFacts, make_profile: Machine, gpu: int, host: int, nvme: int
) -> None:
    profile = make_profile(h2d_bytes_s=2e9, d2h_bytes_s=2e9)
    budgets: dict[str, Any] = {
        "gpu_memory": gpu * MIB, "host_memory": host_memory(facts, host), "nvme": nvme * MIB,
    }  # fmt: skip
    answer = plan(facts, profile, **budgets)
    if not answer.feasible:
        assert gpu == 24 and answer.reasons
        return
    assert answer.policy and answer.predicted and answer.solver
    assert shortages(answer.policy, facts, Budgets.of(profile, **budgets)) == []
    assert answer.predicted.step_s == simulate(answer.policy, facts, profile).step_s
    assert all(answer.predicted.step_s <= rule.step_s for rule in answer.baselines.values())
    assert answer.solver.planner == "full"
    assert answer.solver.gap is not None and 0 <= answer.solver.gap < 0.2  # one of 12 layers is 8 %
    assert (answer.solver.status == "OPTIMAL") == (answer.solver.gap <= 0.01)


def test_a_solver_that_fails_on_every_model_leaves_the_best_rule_and_an_honest_gap(
    facts: ModelFacts, make_profile: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MathOpt lets some errors of HiGHS out as errors of its own wrapper."""

    def failing(*_: object, **__: object) -> None:
        raise AttributeError("'StatusNotOk' object has no attribute 'canonical_code'")

    monkeypatch.setattr(mathopt, "solve", failing)
    answer = plan(facts, make_profile(), gpu_memory=44 * MIB, host_memory=host_memory(facts, 6))
    assert answer.predicted and answer.solver and answer.solver.gap is not None
    assert answer.predicted.step_s == min(rule.step_s for rule in answer.baselines.values())
    assert answer.solver.status == "FEASIBLE" and answer.solver.gap > 0.01


def test_a_process_without_stdout_plans_as_any_other(
    facts: ModelFacts, make_profile: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that was started with ``>&-``: the solver's own lines have nowhere to go then."""
    budgets: dict[str, Any] = {"gpu_memory": 44 * MIB, "baselines": False}
    wanted = plan(facts, make_profile(), **budgets)
    monkeypatch.setattr(sys, "stdout", None)
    assert plan(facts, make_profile(), **budgets).policy == wanted.policy


def test_memory_for_everything_means_that_nothing_runs_twice(facts: ModelFacts, make_profile: Machine) -> None:
    answer = plan(facts, make_profile(), gpu_memory=1000 * MIB, host_memory=host_memory(facts, 0))
    assert answer.predicted and answer.predicted.compute_units == pytest.approx(3.0)
    assert answer.predicted.step_s <= answer.baselines["keep_all"].step_s


def test_a_fast_link_swaps_what_a_slow_link_recomputes(facts: ModelFacts, make_profile: Machine) -> None:
    units = []
    for rate in (0.5e9, 50e9):
        profile = make_profile(h2d_bytes_s=rate, d2h_bytes_s=rate)
        answer = plan(facts, profile, gpu_memory=75 * MIB, host_memory=host_memory(facts, 400))
        assert answer.policy and answer.predicted
        units.append(answer.predicted.compute_units)
        swapped = [x for x in answer.policy.layers if x.internals != "none" and x.internals_home == "host"]
        assert bool(swapped) == (rate > 1e9)
    assert units[1] < units[0]


@pytest.mark.parametrize("budget", ["gpu_memory", "host_memory", "nvme"])
@pytest.mark.parametrize("seed", range(2))
def test_more_of_any_memory_is_never_slower(make_facts: Make, make_profile: Machine, budget: str, seed: int) -> None:
    """By more than a proof leaves open."""
    choose = random.Random(seed)
    facts = make_facts(6, flops=choose.choice((3e9, 5e9)), workspace=choose.choice((4, 8)) * MIB)
    rate = choose.choice((1e9, 2e9, 4e9))
    profile = make_profile(h2d_bytes_s=rate, d2h_bytes_s=rate)
    least = {"gpu_memory": choose.randint(24, 40) * MIB, "host_memory": host_memory(facts, 3), "nvme": 0}
    last = float("inf")
    for more in (0, 8, 200):
        answer = plan(facts, profile, **{**least, budget: least[budget] + more * MIB})
        if answer.predicted is None:
            assert last == float("inf")  # what fits goes on to fit
            continue
        assert answer.predicted.step_s <= last / (1 - 0.01)
        last = min(last, answer.predicted.step_s)
    assert last < float("inf")


def test_policies_that_do_not_fit_do_not_end_the_search_of_a_shape(make_facts: Make, make_profile: Machine) -> None:
    """The program counts less memory here and there than is taken; its first answers are refused, the next proves."""
    facts = make_facts(3, flops=[3e9, 5e9, 1e9], workspace=8 * MIB)
    answer = plan(facts, make_profile(d2h_bytes_s=2e9), gpu_memory=int(23.4 * MIB), baselines=False)
    assert answer.solver and answer.solver.status == "OPTIMAL"


def test_a_family_that_nobody_can_look_at_more_closely_does_not_end_the_search(
    make_facts: Make, make_profile: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More NVMe had made a 4-layer plan 1.1 % slower so: the family with the better plan was never opened."""
    opened: list[Family] = []
    monkeypatch.setattr(full, "PROOF", -1.0)  # nothing is proven enough
    monkeypatch.setattr(Search, "_open", lambda _, least: bool(opened.append(least.family)))
    answer = plan(make_facts(4), make_profile(nvme_bytes=8 * MIB), gpu_memory=30 * MIB, baselines=False)
    assert answer.solver and len(opened) == len(set(opened)) > 3


@pytest.mark.parametrize(("layers", "goes_on"), [(5, True), (20, False)])
def test_many_micro_batches_shorten_the_search_of_many_layers_only(
    make_facts: Make, make_profile: Machine, layers: int, goes_on: bool
) -> None:
    budgets = Budgets.of(make_profile())
    search = Search(Question(make_facts(layers), make_profile(), budgets, 3, "highs", time.monotonic() + 1000.0))
    search.certificate.solved = FAMILIES // 2
    assert search._goes_on() == goes_on


@pytest.mark.parametrize("accumulation", [2, 5])
def test_micro_batches_are_planned_too(facts: ModelFacts, make_profile: Machine, accumulation: int) -> None:
    answer = plan(facts, make_profile(), gpu_memory=60 * MIB, accumulation=accumulation)
    assert answer.policy and answer.policy.accumulation == accumulation and answer.predicted
    assert all(answer.predicted.step_s <= rule.step_s for rule in answer.baselines.values())
    assert answer.solver and answer.solver.gap is not None and 0 <= answer.solver.gap < 0.15


def test_resident_layers_help_where_weights_are_the_traffic(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(12, flops=1e8, parameters=2 * MIB, boundary=MIB // 16)
    answer = plan(facts, make_profile(d2h_bytes_s=4e9), gpu_memory=60 * MIB)
    assert answer.policy and any(layer.resident for layer in answer.policy.layers)
    assert answer.predicted and answer.predicted.step_s < 0.95 * answer.baselines["every_layer"].step_s


PLANS = """
import sys, threading
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.planner import plan

facts, profile = ModelFacts.model_validate_json(sys.argv[1]), HardwareProfile.model_validate_json(sys.argv[2])
policies = {}

def ask(gpu):
    answer = plan(facts, profile, gpu_memory=gpu << 20, solve_seconds=120.0, baselines=False)
    assert not answer.solver.out_of_time
    policies[gpu] = answer.policy.to_json()

threads = [threading.Thread(target=ask, args=(gpu,)) for gpu in (24, 22)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(policies[22] + policies[24], end="")
"""


def test_equal_questions_get_byte_equal_policies(make_facts: Make, make_profile: Machine) -> None:
    """One after the other here, two at once in another process that hashes text differently."""
    facts, profile = make_facts(3, flops=5e9, workspace=8 * MIB), make_profile()
    elsewhere = subprocess.Popen(
        [sys.executable, "-c", PLANS, facts.model_dump_json(), profile.model_dump_json()],
        env=os.environ | {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "3"},
        stdout=subprocess.PIPE,
        text=True,
    )
    here = [plan(facts, profile, gpu_memory=gpu * MIB, baselines=False).policy for gpu in (22, 24)]
    said, _ = elsewhere.communicate()
    assert "".join(policy.to_json() for policy in here if policy) == said
    assert elsewhere.returncode == 0 and None not in here


def test_what_the_clock_ended_is_said(
    facts: ModelFacts, make_profile: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was only the paper's plan, a candidate: another run may begin with another policy."""
    asked: dict[str, Any] = {"gpu_memory": 1000 * MIB, "baselines": False}
    unhurried = plan(facts, make_profile(), **asked).solver
    monkeypatch.setattr(first_policies, "PAPER_SECONDS", 0.0)
    hurried = plan(facts, make_profile(), **asked).solver
    assert unhurried and hurried and (unhurried.out_of_time, hurried.out_of_time) == (False, True)


@pytest.mark.parametrize("turns", [4, 7])
def test_the_papers_plan_ends_on_a_count_and_not_on_a_clock(
    facts: ModelFacts, make_profile: Machine, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Where more than fifty schedules do not fit."""
    solved = []
    solve = Attempt.solve

    def counting(attempt: Attempt, instance: Instance) -> Any:
        solved.append(instance)
        try:
            return solve(attempt, instance)
        except OutOfTimeError:
            solved.pop()
            raise

    monkeypatch.setattr(Attempt, "solve", counting)
    monkeypatch.setattr(first_policies, "PAPER_LAYERS", turns * len(facts.layers))
    profile = make_profile()
    budgets = Budgets.of(profile, gpu_memory=23 * MIB, host_memory=host_memory(facts, 3), nvme=8 * MIB)
    with pytest.raises(OutOfTimeError):
        first_policies.paper_plan(Question(facts, profile, budgets, 1, "highs", time.monotonic() + 1000.0))
    assert len(solved) == turns


def test_out_of_time_gives_the_best_rule(
    facts: ModelFacts, make_profile: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "solve_exact", lambda *_, **__: Exact("NO_SOLUTION"))
    monkeypatch.setattr(full, "MORE", (8, 4))
    answer = plan(facts, make_profile(), gpu_memory=44 * MIB)
    assert answer.solver and answer.solver.status == "FEASIBLE" and answer.predicted
    assert answer.predicted.step_s <= min(rule.step_s for rule in answer.baselines.values())


@pytest.mark.parametrize("accumulation", [1, 4])
def test_no_time_at_all_gives_the_best_rule_with_a_gap(
    facts: ModelFacts, make_profile: Machine, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazytrain.schedulers.planner.bound.Choices", None)  # no model is made of what is not solved
    profile = make_profile()
    answer = plan_with(facts, profile, gpu_memory=44 * MIB, solve_seconds=1e-9, accumulation=accumulation)
    assert answer.predicted and answer.solver and answer.solver.out_of_time
    assert answer.predicted.step_s <= min(rule.step_s for rule in answer.baselines.values())
    assert answer.solver.bound_s is not None and answer.solver.gap is not None
    computing_s = accumulation * 13 * 3 * facts.head.forward_flops / profile.flops("bfloat16")
    assert computing_s * (1 - 1e-6) <= answer.solver.bound_s <= answer.predicted.step_s
    assert answer.solver.gap == pytest.approx(1 - answer.solver.bound_s / answer.predicted.step_s, abs=1e-6)


def test_a_host_too_small_for_the_state_is_refused_to_the_byte(facts: ModelFacts, make_profile: Machine) -> None:
    answer = plan(facts, make_profile(), host_memory=MIB)
    (reason,) = answer.reasons
    assert (reason.resource, reason.needed_bytes) == ("host_memory", host_memory(facts, 0))
    assert plan(facts, make_profile(), host_memory=reason.needed_bytes).feasible


def test_a_gpu_too_small_is_refused_with_what_is_enough(facts: ModelFacts, make_profile: Machine) -> None:
    answer = plan(facts, make_profile(), gpu_memory=10 * MIB)
    (reason,) = answer.reasons
    assert reason.resource == "gpu_memory" and reason.shortfall_bytes == reason.needed_bytes - 10 * MIB
    assert plan(facts, make_profile(), gpu_memory=reason.needed_bytes).feasible


def test_time_that_ran_out_is_never_called_infeasible(
    facts: ModelFacts, make_profile: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_time(_: Any) -> None:
        raise OutOfTimeError

    monkeypatch.setattr(first_policies, "find", out_of_time)
    with pytest.raises(LazytrainError, match="in the time it had"):
        plan(facts, make_profile(), gpu_memory=16 * MIB, host_memory=host_memory(facts, 0))


def test_changes_that_are_named_were_tried(make_facts: Make, make_profile: Machine) -> None:
    def facts_at(batch: int) -> ModelFacts:
        return make_facts(6, boundary=batch * MIB, workspace=4 * batch * MIB, micro_batch=batch)

    profile = make_profile(gpu_memory_bytes=40 * MIB)
    answer = plan(facts_at(16), profile, facts_at=facts_at)
    assert not answer.feasible
    named = {change.what: change for change in answer.changes}
    assert set(named) == {"batch", "gpu_memory"}
    batch = next(b for b in (8, 4, 2, 1) if f"of {b} rows" in named["batch"].words)
    assert plan(facts_at(batch), profile, accumulation=16 // batch).feasible
    assert not plan(facts_at(2 * batch), profile, accumulation=8 // batch).feasible
    assert answer.to_dict()["changes"][0]["tokens_per_s"] > 0


@pytest.mark.parametrize("short", [3 * MIB + 12_345, 60_001, 40 * MIB + 1])
@pytest.mark.parametrize("budget", ["gpu_memory", "host_memory"])
def test_advice_that_is_followed_to_the_letter_is_enough(
    make_facts: Make, make_profile: Machine, budget: str, short: int
) -> None:
    """The amounts that are written, not the bytes that they stand for."""
    facts = make_facts(6, workspace=8 * MIB)
    needed = {"gpu_memory": (19 if budget == "gpu_memory" else 24) * MIB, "host_memory": host_memory(facts, 0)}
    budgets: dict[str, Any] = {**needed, budget: max(1, needed[budget] - short)}
    answer = plan(facts, make_profile(), **budgets)
    assert not answer.feasible
    for change in answer.changes:
        amount = re.search(r"([\d.]+\w+) (?:in all|on NVMe)", change.words)
        if amount:
            advised = {**budgets, change.what: amount[1]}
            assert plan(facts, make_profile(), baselines=False, **advised).feasible, change.words
    more = re.search(r"([\d.]+\w+) more", answer.reasons[0].hint)
    assert more and answer.changes
    budgets[budget] += parse_bytes(more[1])
    assert plan(facts, make_profile(), baselines=False, **budgets).feasible


def test_no_smaller_batch_is_tried_whose_step_takes_long_to_write_down(
    make_facts: Make, make_profile: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of 65,536 rows halved to 1 would be a step of as many micro-batches."""
    asked = []

    def facts_at(batch: int) -> ModelFacts:
        asked.append(batch)
        return make_facts(6, boundary=batch * MIB, workspace=4 * batch * MIB, micro_batch=batch)

    monkeypatch.setattr("lazytrain.schedulers.planner.changes.MOST_LAYER_RUNS", 50)
    answer = plan(facts_at(1 << 16), make_profile(gpu_memory_bytes=40 * MIB), facts_at=facts_at)
    assert not answer.feasible and "batch" not in {change.what for change in answer.changes}
    assert asked == [1 << 16, 1 << 15, 1 << 14, 1 << 13]  # 8 micro-batches of 6 layers


def test_a_shorter_master_is_named_where_it_is_enough(facts: ModelFacts, make_profile: Machine) -> None:
    low_halves = 2 * facts.parameters
    short = plan(facts, make_profile(), host_memory=host_memory(facts, 0) - low_halves // 2)
    assert {change.what for change in short.changes} == {"master", "nvme", "host_memory"}
    shorter = plan(facts, make_profile(), host_memory=host_memory(facts, 0) - 2 * low_halves)
    assert "master" not in {change.what for change in shorter.changes}
    assert "host_memory" in {change.what for change in shorter.changes}


def test_state_that_does_not_fit_the_host_goes_to_nvme(facts: ModelFacts, make_profile: Machine) -> None:
    short = host_memory(facts, 0) - 20 * MIB
    without = plan(facts, make_profile(), host_memory=short)
    assert not without.feasible and "nvme" in {change.what for change in without.changes}
    profile = make_profile(nvme_bytes=1 << 30)
    answer = plan(facts, profile, host_memory=short)
    assert answer.policy and answer.predicted and answer.solver
    parked = [layer.index for layer in answer.policy.layers if layer.optimizer_home == "nvme"]
    assert parked in (list(range(12))[: len(parked)], list(range(12))[-len(parked) :])  # those of one end
    assert parked and answer.policy.optimizer_home == "nvme"
    assert shortages(answer.policy, facts, Budgets.of(profile, host_memory=short)) == []
    assert answer.solver.bound_s is not None and answer.solver.bound_s <= answer.predicted.step_s
    assert answer.predicted.step_s > 20 * MIB / profile.nvme_read_bytes_s


@pytest.mark.parametrize("seed", range(4))
def test_brute_force_over_every_shape_finds_nothing_beyond_the_bound(
    make_facts: Make, make_profile: Machine, seed: int
) -> None:
    """All policies of two layers: homes, internals, resident layers, slots."""
    choose = random.Random(seed)
    facts = make_facts(2, flops=choose.choice((1e9, 4e9)), workspace=8 * MIB, tied=seed % 2 == 0)
    profile = make_profile(h2d_bytes_s=choose.choice((1e9, 4e9)), d2h_bytes_s=choose.choice((1e9, 4e9)))
    memory = {"gpu_memory": choose.randint(22, 50) * MIB, "host_memory": host_memory(facts, choose.choice((0, 40)))}
    budgets = Budgets.of(profile, **memory)
    fitting = [p for p in every_policy_of_two_layers(facts) if not shortages(p, facts, budgets)]
    answer = plan(facts, profile, **memory)
    assert answer.feasible == bool(fitting)
    if answer.predicted and answer.solver and answer.solver.bound_s:
        fastest_s = min(simulate(policy, facts, profile).step_s for policy in fitting)
        assert answer.solver.bound_s * (1 - 1e-6) <= fastest_s <= answer.predicted.step_s * (1 + 1e-6)


def every_policy_of_two_layers(facts: ModelFacts) -> Iterator[Policy]:
    kinds: list[Any] = [("none", "gpu"), ("matmuls", "gpu"), ("matmuls", "host"), ("all", "gpu"), ("all", "host")]
    shapes = list(itertools.product((2, 3), (1, 2, 3), ((False, False), (True, False), (False, True), (True, True))))
    for first, second in itertools.product(("gpu", "host"), ("gpu", "host", "recompute")):
        homes: list[Any] = [first, second, "gpu"]
        pairs = itertools.product(kinds, kinds) if second != "recompute" else [(kinds[0], kinds[0])]
        for kept, (weights, staging, resident) in itertools.product(pairs, shapes):
            layers = tuple(
                LayerPolicy(index=i, internals=kept[i][0], internals_home=kept[i][1], resident=resident[i])
                for i in range(2)
            )
            made = Policy.from_homes(facts, homes, weight_slots=weights)
            yield made.model_copy(update={"layers": layers, "staging_slots": staging})
