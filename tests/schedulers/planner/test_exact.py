"""The full planner's program means what the simulator means: for any policy, and so for the best one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from ortools.math_opt.python import mathopt

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import LayerPolicy, Policy
from lazytrain.schedulers.baselines import shortages
from lazytrain.schedulers.costs import state_bytes
from lazytrain.schedulers.hardware import Budgets, HardwareProfile
from lazytrain.schedulers.planner.choices import Choices
from lazytrain.schedulers.planner.exact import REFUSED, solve_exact
from lazytrain.schedulers.planner.linear import Model
from lazytrain.schedulers.planner.parking import Parking, park
from lazytrain.schedulers.planner.problem import Problem, Shape
from lazytrain.schedulers.planner.solver import run_solver
from lazytrain.schedulers.planner.timing import Timing
from lazytrain.schedulers.simulator import simulate

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]
PLENTY = Budgets(gpu_bytes=1 << 34, host_bytes=1 << 36, nvme_bytes=1 << 34)
INTERNALS = [("none", "gpu"), ("matmuls", "gpu"), ("matmuls", "host"), ("all", "gpu"), ("all", "host")]


def draw_facts(make_facts: Make, choose: random.Random, layers: int) -> ModelFacts:
    """Layers of equal or of different speed, from links that are no trouble to links that are."""
    flops: Any = [choose.uniform(0.5, 8) * 1e9 for _ in range(layers)] if choose.random() < 0.5 else 3e9
    return make_facts(
        layers,
        flops=flops,
        workspace=choose.choice((0, 4, 12)) * MIB,
        tied=choose.random() < 0.4,
        parameters=int(choose.choice((0.2, 0.5, 1, 2)) * MIB),
    )


def draw_profile(make_profile: Machine, choose: random.Random) -> HardwareProfile:
    return make_profile(
        h2d_bytes_s=choose.choice((0.5e9, 1e9, 2e9)),
        d2h_bytes_s=choose.choice((0.5e9, 1e9, 2e9)),
        nvme_read_bytes_s=choose.choice((0.2e9, 1e9)),
        nvme_write_bytes_s=choose.choice((0.2e9, 1e9)),
        update_parameters_s=choose.choice((0.3e9, 1e9, 5e9)),
        operation_overhead_s=choose.choice((0.0, 1e-4)),
    )


def draw_policy(facts: ModelFacts, choose: random.Random, accumulation: int, homes_of: list[str]) -> Policy:
    """Any policy that the full planner could choose."""
    layers, resident_share = len(facts.layers), choose.choice((0.0, 0.0, 0.4))
    recomputed = choose.random()
    homes: list[Any] = [
        "recompute" if i and choose.random() < recomputed else choose.choice(homes_of) for i in range(layers)
    ]
    homes.append("gpu")
    kept = [choose.choice(INTERNALS) if "recompute" not in homes[i : i + 2] else ("none", "gpu") for i in range(layers)]
    made = Policy.from_homes(facts, homes, accumulation=accumulation, weight_slots=choose.choice((2, 3, 4)))
    changes = {
        "staging_slots": choose.choice((1, 2, 3)),
        "layers": tuple(
            LayerPolicy(index=i, internals=kind, internals_home=home, resident=choose.random() < resident_share)
            for i, (kind, home) in enumerate(kept)
        ),
    }
    return made.model_copy(update=changes)


def step_of(policy: Policy, problem: Problem) -> float:
    """The program's step time when every choice is that of ``policy``, in seconds."""
    model = Model("exact")
    choices = Choices(model, problem)
    timing = Timing(choices)
    kept = [i for i, home in enumerate(policy.homes) if home != "recompute"]
    blocks = {(start, end): policy.homes[start] for start, end in itertools.pairwise(kept)}

    def fix(variable: Any, on: bool) -> None:
        model.lower[variable.id] = model.upper[variable.id] = float(on)

    for edge, variables in choices.edges.items():
        for variable, homes in zip(variables, (("gpu",), ("host", "nvme")), strict=True):
            fix(variable, blocks.get(edge) in homes)
    for i, variable in enumerate(choices.nvme):
        fix(variable, policy.homes[i] == "nvme")
    for (i, kind, home), variable in choices.kept.items():
        fix(variable, (policy.layers[i].internals, policy.layers[i].internals_home) == (kind, home))
    model.minimize(timing.step)
    answer = run_solver(model, "highs", 60.0, 0.0)
    assert answer.values is not None, answer.status
    assert choices.decode(answer.values).homes == policy.homes
    return answer.objective * problem.horizon_s


def shape_of(policy: Policy) -> Shape:
    resident = frozenset(layer.index for layer in policy.layers if layer.resident)
    return Shape(policy.weight_slots, policy.staging_slots, resident)


@pytest.mark.parametrize("seed", [*range(60), 136, 193, 313])
def test_any_policy_takes_as_long_as_in_the_simulator(make_facts: Make, make_profile: Machine, seed: int) -> None:
    choose = random.Random(seed)
    facts = draw_facts(make_facts, choose, choose.randint(1, 11))
    if seed % 5 == 4 and not facts.head.shares_weights_with:
        facts = facts.model_copy(update={"before": ()})
    profile, accumulation = draw_profile(make_profile, choose), choose.choice((1, 1, 2, 3))
    homes = ["gpu", "host"] if seed % 3 and seed < 60 else ["gpu", "host", "nvme"]
    policy = draw_policy(facts, choose, accumulation, homes)
    expected = simulate(policy, facts, profile).step_s
    horizon_s = expected * choose.choice((1.001, 1.5, 3.0))
    problem = Problem(facts, profile, PLENTY, shape_of(policy), horizon_s, 12, accumulation)
    assert step_of(policy, problem) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("seed", range(30))
def test_the_optimum_is_the_simulated_step_of_its_policy(make_facts: Make, make_profile: Machine, seed: int) -> None:
    choose = random.Random(seed)
    facts, profile = draw_facts(make_facts, choose, choose.randint(2, 9)), draw_profile(make_profile, choose)
    shape = Shape(choose.choice((2, 3)), choose.choice((1, 2, 3)))
    budgets = tight_budgets(facts, shape, choose)
    horizon_s = 2 * simulate(Policy.from_homes(facts, ["gpu"] * (len(facts.layers) + 1)), facts, profile).step_s
    answer = solve_exact(Problem(facts, profile, budgets, shape, horizon_s), gap=1e-4)
    if answer.policy is None:
        assert answer.status == "INFEASIBLE"
        return
    assert answer.step_s == pytest.approx(simulate(answer.policy, facts, profile).step_s, rel=1e-3)
    assert answer.bound_s <= answer.step_s * (1 + 1e-9) and answer.bound_s >= answer.step_s * (1 - 1e-3)


def tight_budgets(facts: ModelFacts, shape: Shape, choose: random.Random) -> Budgets:
    slots = shape.weight_slots * facts.layers[0].weight_bytes
    return Budgets(
        gpu_bytes=slots + int(choose.uniform(20, 60) * MIB),
        host_bytes=sum(state_bytes(facts).values()) + choose.choice((16, 24, 60, 120)) * MIB,
        nvme_bytes=0,
    )


def every_policy(facts: ModelFacts, shape: Shape) -> Iterator[Policy]:
    """All policies of three layers with one shape."""
    layers = range(len(facts.layers))
    for homes in itertools.product(("gpu", "host"), *[("gpu", "host", "recompute")] * (len(facts.layers) - 1)):
        ends = [*homes, "gpu"]
        kinds = [INTERNALS if "recompute" not in ends[i : i + 2] else INTERNALS[:1] for i in layers]
        for kept in itertools.product(*kinds):
            made = Policy.from_homes(facts, ends, weight_slots=shape.weight_slots)
            chosen = [LayerPolicy(index=i, internals=kept[i][0], internals_home=kept[i][1]) for i in layers]
            yield made.model_copy(update={"staging_slots": shape.staging_slots, "layers": tuple(chosen)})


@pytest.mark.parametrize("seed", range(5))
def test_no_policy_of_a_small_chain_is_faster(make_facts: Make, make_profile: Machine, seed: int) -> None:
    """All of up to 1,250 policies that fit, against the solver's."""
    choose = random.Random(seed)
    facts, profile, shape = draw_facts(make_facts, choose, 3), draw_profile(make_profile, choose), Shape(2, 2)
    budgets = tight_budgets(facts, shape, choose)
    steps = {p: simulate(p, facts, profile).step_s for p in every_policy(facts, shape)}
    answer = solve_exact(Problem(facts, profile, budgets, shape, max(steps.values())), gap=1e-6)
    fitting = sorted((step_s, p.to_json()) for p, step_s in steps.items() if not shortages(p, facts, budgets))
    assert answer.step_s is not None and fitting
    assert answer.step_s == pytest.approx(fitting[0][0], rel=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_what_is_refused_is_left_out_and_nothing_else(make_facts: Make, make_profile: Machine, seed: int) -> None:
    """The answer is the fastest that is not refused, and the bound is one of the others."""
    choose = random.Random(seed)
    facts, profile, shape = draw_facts(make_facts, choose, 2), draw_profile(make_profile, choose), Shape(2, 2)
    refused: list[Policy] = []

    def fits(policy: Policy) -> bool:
        refused.append(policy)
        return len(refused) > 3

    answer = solve_exact(Problem(facts, profile, PLENTY, shape, 1.0), gap=1e-6, fits=fits)
    *left_out, taken = refused
    assert answer.policy == taken and len(set(refused)) == 4
    others = (policy for policy in every_policy(facts, shape) if policy not in left_out)
    fastest_s = min(simulate(policy, facts, profile).step_s for policy in others)
    assert answer.step_s == pytest.approx(fastest_s, rel=1e-4)
    assert answer.bound_s == pytest.approx(fastest_s, rel=1e-4)


def test_refusals_end(make_facts: Make, make_profile: Machine) -> None:
    asked: list[Policy] = []
    problem = Problem(make_facts(3), make_profile(), PLENTY, Shape(), 1.0, 3)
    answer = solve_exact(problem, fits=lambda policy: bool(asked.append(policy)))
    assert len(set(asked)) == len(asked) == REFUSED and answer.policy not in asked


@pytest.mark.parametrize("seed", range(4))
def test_the_second_solver_finds_the_same_optimum(make_facts: Make, make_profile: Machine, seed: int) -> None:
    """HiGHS once called an answer optimal that was 1 % off."""
    choose = random.Random(seed)
    facts, profile, shape = draw_facts(make_facts, choose, 5), draw_profile(make_profile, choose), Shape(2, 2)
    horizon_s = 2 * simulate(Policy.from_homes(facts, ["gpu"] * 6), facts, profile).step_s
    problem = Problem(facts, profile, tight_budgets(facts, shape, choose), shape, horizon_s)
    answers = [solve_exact(problem, backend=backend, gap=1e-4) for backend in ("highs", "gscip")]
    assert answers[0].status == answers[1].status
    assert answers[0].step_s == pytest.approx(answers[1].step_s, rel=2e-4)


def test_a_solver_that_fails_when_told_what_is_enough_is_asked_once_more(
    make_facts: Make, make_profile: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As HiGHS does on one case of the grid, by an error of its wrapper."""
    facts, profile, asked = make_facts(3), make_profile(), []
    solve = mathopt.solve

    def failing(model: Any, kind: Any, *, params: Any) -> Any:
        asked.append(bool(params.highs and params.highs.double_options))
        if asked[-1]:
            raise AttributeError("canonical_code")
        return solve(model, kind, params=params)

    monkeypatch.setattr(mathopt, "solve", failing)
    problem = Problem(facts, profile, PLENTY, Shape(), 1.0, 3)
    answer = solve_exact(problem, enough_s=1e-6)
    assert asked == [True, False] * 2 and answer.status == "OPTIMAL"  # of few layers both ways


def test_what_runs_after_the_layers_has_room_too(make_facts: Make, make_profile: Machine) -> None:
    """A last norm whose backward needs much while every boundary is still there: what the program chose fits."""
    facts = make_facts(6, flops=3e9)
    norm = facts.after[0].model_copy(update={"backward_workspace_bytes": 40 * MIB})
    facts, profile = facts.model_copy(update={"after": (norm,)}), make_profile()
    budgets = Budgets(gpu_bytes=80 * MIB, host_bytes=1 << 33, nvme_bytes=0)
    found = solve_exact(Problem(facts, profile, budgets, Shape(), 1.0, 6))
    assert found.policy is not None
    assert any(layer.internals != "none" for layer in found.policy.layers)
    assert not shortages(found.policy, facts, budgets)


@pytest.mark.parametrize("seed", range(24))
def test_parked_state_takes_as_long_as_in_the_simulator(make_facts: Make, make_profile: Machine, seed: int) -> None:
    """On disks that are still busy with the updates when boundaries go there and when the step ends, and on fast ones.

    A boundary on the host waits for no disk; the last gradient's write belongs to the step.
    """
    choose = random.Random(seed)
    facts, profile = draw_facts(make_facts, choose, choose.randint(1, 9)), draw_profile(make_profile, choose)
    rates = {name: choose.choice((0.02e9, 0.2e9, 1e9)) for name in ("nvme_read_bytes_s", "nvme_write_bytes_s")}
    profile, accumulation = profile.model_copy(update=rates), choose.choice((1, 1, 2, 3))
    policy = draw_policy(facts, choose, accumulation, choose.choice((["gpu", "host"], ["gpu", "host", "nvme"])))
    states, gradients = (choose.choice((0, choose.randint(0, len(facts.layers)))) for _ in range(2))
    parking = Parking(states, gradients, early=choose.random() < 0.5)
    policy = park(policy, facts, parking)
    expected = simulate(policy, facts, profile).step_s
    shape = replace(shape_of(policy), parked=parking)
    problem = Problem(facts, profile, PLENTY, shape, expected * 1.5, 12, accumulation)
    assert step_of(policy, problem) == pytest.approx(expected, rel=1e-5)


FIRST_THAT_LEARNS = {"adapters": -1, "the upper layers": 2, "the head": 99}


def partly_frozen(facts: ModelFacts, first: int) -> ModelFacts:
    """Layers below ``first`` frozen; with -1, all but a part of every layer. Embedding and norm always are."""

    def frozen(unit: Any, learning: int) -> Any:
        number = unit.parameters - learning
        return unit.model_copy(update={"frozen_parameters": number, "frozen_bytes": unit.weight_bytes - 2 * learning})

    before, after = (tuple(frozen(unit, 0) for unit in units) for units in (facts.before, facts.after))
    layers = tuple(
        frozen(layer, 4096 if first < 0 else 0) if i < first or first < 0 else layer
        for i, layer in enumerate(facts.layers)
    )
    return facts.model_copy(update={"before": before, "layers": layers, "after": after})


@pytest.mark.parametrize("learns", FIRST_THAT_LEARNS)
@pytest.mark.parametrize("seed", range(4))
def test_a_step_ends_with_its_last_backward_where_what_comes_first_is_frozen(
    make_facts: Make, make_profile: Machine, seed: int, learns: str
) -> None:
    """No gradient and no norm then says when the last unit's backward is over."""
    choose = random.Random(seed)
    facts = make_facts(choose.randint(3, 6), flops=3e9, parameters=choose.choice((1, 4)) * MIB)
    facts, profile = partly_frozen(facts, FIRST_THAT_LEARNS[learns]), draw_profile(make_profile, choose)
    accumulation = choose.choice((1, 2))
    policy = draw_policy(facts, choose, accumulation, ["gpu", "host"])
    expected = simulate(policy, facts, profile).step_s
    problem = Problem(facts, profile, PLENTY, shape_of(policy), 2 * expected, 12, accumulation)
    assert step_of(policy, problem) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_micro_batches_that_repeat_take_about_as_long_as_in_the_simulator(
    make_facts: Make, make_profile: Machine, seed: int
) -> None:
    """And never longer: what one leaves to the next, a copy under way or a load ahead, is the difference."""
    choose = random.Random(seed)
    facts, profile = draw_facts(make_facts, choose, choose.randint(4, 9)), draw_profile(make_profile, choose)
    policy = draw_policy(facts, choose, 6, ["gpu", "host"])
    expected = simulate(policy, facts, profile).step_s
    problem = Problem(facts, profile, PLENTY, shape_of(policy), expected * 1.5, 12, 2, repeats=4)
    assert 0.88 * expected <= step_of(policy, problem) <= expected * (1 + 1e-6)


def test_the_second_solver_agrees_on_a_long_chain(make_facts: Make, make_profile: Machine) -> None:
    """64 layers of which some keep their products, some swap them."""
    facts = make_facts(64, flops=5e9, workspace=8 * MIB)
    profile = make_profile(h2d_bytes_s=2e9, d2h_bytes_s=2e9)
    budgets = Budgets(gpu_bytes=140 * MIB, host_bytes=1 << 34, nvme_bytes=0)
    horizon_s = simulate(Policy.from_homes(facts, ["gpu"] * 65), facts, profile).step_s
    problem = Problem(facts, profile, budgets, Shape(2, 3), horizon_s, longest_block=1)
    first, second = (solve_exact(problem, backend=backend, gap=0.01) for backend in ("highs", "gscip"))
    assert first.step_s and second.step_s
    assert max(first.bound_s, second.bound_s) <= min(first.step_s, second.step_s) * (1 + 1e-6)
    assert first.step_s == pytest.approx(second.step_s, rel=0.02)


def test_only_the_layers_that_may_use_nvme_do(make_facts: Make, make_profile: Machine) -> None:
    """With room on the host for a few boundaries, and links on which it pays to keep what can be."""
    facts = make_facts(8, flops=8e9, workspace=8 * MIB)
    profile = make_profile(h2d_bytes_s=8e9, d2h_bytes_s=8e9, nvme_bytes=1 << 30)
    problem = Problem(facts, profile, Budgets.of(profile, gpu_memory=60 * MIB), Shape(3, 3), 1.0, 1)
    policy = solve_exact(replace(problem, on_nvme=frozenset({0})), gap=1e-3).policy
    assert policy and {i for i, home in enumerate(policy.homes) if home == "nvme"} <= {0}
