"""No policy of a family is faster than its bound, none that fits is refused, and the proof is for all shapes."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lazytrain.jobs.model_facts import ModelFacts, UnitFacts
from lazytrain.jobs.policy import LayerPolicy, Policy, lower
from lazytrain.schedulers.costs import host_bytes
from lazytrain.schedulers.hardware import Budgets, HardwareProfile
from lazytrain.schedulers.planner.bound import (
    STAGING_SLOTS,
    WEIGHT_SLOTS,
    Bound,
    Certificate,
    bound_of,
    families_of,
    parts_of,
)
from lazytrain.schedulers.planner.choices import Choices
from lazytrain.schedulers.planner.counts import count
from lazytrain.schedulers.planner.exact import solve_exact
from lazytrain.schedulers.planner.linear import Model, fast_sum
from lazytrain.schedulers.planner.loose import Family, LooseTiming
from lazytrain.schedulers.planner.parking import NOTHING, Parking, most_spared_bytes, park, parkable
from lazytrain.schedulers.planner.problem import Problem, Shape
from lazytrain.schedulers.planner.solver import run_solver
from lazytrain.schedulers.simulator import simulate

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]
INTERNALS = [("none", "gpu"), ("matmuls", "gpu"), ("matmuls", "host"), ("all", "gpu"), ("all", "host")]


def draw(
    make_facts: Make, make_profile: Machine, choose: random.Random, layers: int
) -> tuple[ModelFacts, HardwareProfile]:
    """Equal or different layers, links from fast to slow, host memory that is sometimes the bottleneck."""
    flops: Any = [choose.uniform(0.5, 8) * 1e9 for _ in range(layers)] if choose.random() < 0.5 else 3e9
    facts = make_facts(
        layers, flops=flops, workspace=choose.choice((0, 12)) * MIB, tied=choose.random() < 0.4,
        parameters=int(choose.choice((0.2, 0.5, 1, 2)) * MIB),
    )  # fmt: skip
    rates = {
        name: choose.choice((0.3e9, 1e9, 4e9))
        for name in ("h2d_bytes_s", "d2h_bytes_s", "nvme_read_bytes_s", "nvme_write_bytes_s", "update_parameters_s")
    }
    return facts, make_profile(**rates, host_bytes_s=choose.choice((1e9, 1e10, 1e11)), nvme_bytes=1 << 30)


def draw_varied(facts: ModelFacts, choose: random.Random) -> ModelFacts:
    """The same chain with layers of different sizes, working memory that depends on what is kept, and other ends."""

    def varied(unit: UnitFacts) -> UnitFacts:
        changes: dict[str, Any] = {
            "output_bytes": choose.choice((1, 2, 3)) * MIB,
            "input_bytes": choose.choice((0, 0, 1, 4)) * MIB,
            "saved_bytes": choose.choice((2, 7, 30)) * MIB,
            "forward_workspace_bytes": choose.choice((0, 5, 9)) * MIB,
            "backward_workspace_bytes": choose.choice((0, 5, 15)) * MIB,
            "keeping_matmuls_bytes": tuple(choose.choice((-3, 0, 8)) * MIB for _ in range(2)),
            "keeping_all_bytes": tuple(choose.choice((-5, 0, 8)) * MIB for _ in range(2)),
            "frozen_bytes": choose.choice((0, 0, unit.weight_bytes)),
        }
        made = unit.model_copy(update={name: choose.choice((changes[name], getattr(unit, name))) for name in changes})
        return made.model_copy(update={"frozen_parameters": made.parameters if made.frozen_bytes else 0})

    layers = tuple(varied(layer) for layer in facts.layers) if choose.random() < 0.6 else facts.layers
    (norm,) = facts.after
    norm = norm.model_copy(update={"output_bytes": layers[-1].output_bytes})
    after = tuple(
        norm.model_copy(update={"name": f"model.norm{i}", "weight_bytes": choose.choice((2000, 2 * MIB))})
        for i in range(choose.choice((0, 1, 1, 2, 3)))
    )
    head = facts.head.model_copy(update={"backward_workspace_bytes": choose.choice((0, 6, 30)) * MIB})
    ends = {"after": after, "head": head, "loss": choose.choice(("chunks", "whole"))}
    return facts.model_copy(update={"layers": layers, "input_stays": choose.random() < 0.3, **ends})


def draw_policy(facts: ModelFacts, choose: random.Random, accumulation: int) -> Policy:
    layers = len(facts.layers)
    recomputed, homes_of = choose.random(), choose.choice((["gpu", "host"], ["gpu", "host", "nvme"]))
    homes: list[Any] = [
        "recompute" if i and choose.random() < recomputed else choose.choice(homes_of) for i in range(layers)
    ]
    kept = [
        choose.choice(INTERNALS) if "recompute" not in [*homes, "gpu"][i : i + 2] else INTERNALS[0]
        for i in range(layers)
    ]
    share = choose.choice((0.0, 0.0, 0.4))
    made = Policy.from_homes(facts, [*homes, "gpu"], accumulation=accumulation, weight_slots=choose.choice((2, 3, 4)))
    chosen = [
        LayerPolicy(index=i, internals=what, internals_home=home, resident=choose.random() < share)  # type: ignore[arg-type]
        for i, (what, home) in enumerate(kept)
    ]
    return made.model_copy(update={"staging_slots": choose.choice((1, 2, 3)), "layers": tuple(chosen)})


@pytest.mark.parametrize("seed", range(50))
def test_no_policy_is_faster_than_the_bound_of_its_counts(make_facts: Make, make_profile: Machine, seed: int) -> None:
    """The bound's program, told how many layers do what, says no more than the simulator; its memory is enough."""
    choose = random.Random(seed)
    facts, profile = draw(make_facts, make_profile, choose, choose.randint(2, 10))
    accumulation = choose.choice((1, 1, 2, 4))
    policy = draw_policy(facts, choose, accumulation)
    assert_no_faster(policy, facts, profile)


@pytest.mark.parametrize("seed", range(16))
def test_nor_is_one_with_state_on_nvme(make_facts: Make, make_profile: Machine, seed: int) -> None:
    """With no more host memory than it has, so that the bound must park too, on disks from slow to fast."""
    choose = random.Random(seed)
    facts, profile = draw(make_facts, make_profile, choose, choose.randint(2, 10))
    rates = {name: choose.choice((0.02e9, 0.2e9, 1e9)) for name in ("nvme_read_bytes_s", "nvme_write_bytes_s")}
    policy = draw_policy(facts, choose, choose.choice((1, 1, 2, 4)))
    policy = park(
        policy, facts, Parking(*(choose.randint(0, len(facts.layers)) for _ in range(2)), early=choose.random() < 0.5)
    )
    assert_no_faster(policy, facts, profile.model_copy(update=rates))


def used_by(policy: Policy, facts: ModelFacts) -> Budgets:
    """As much of every memory as the policy needs, to the byte."""
    program = lower(policy, facts)
    return Budgets(
        gpu_bytes=program.peak_bytes("gpu"),
        host_bytes=sum(host_bytes(facts, policy, program).values()),
        nvme_bytes=program.peak_bytes("nvme"),
    )


@pytest.mark.parametrize("part", range(4))
def test_the_memory_of_choices_is_not_above_the_programs(make_facts: Make, make_profile: Machine, part: int) -> None:
    """The exact program's with the policy's shape, and the bound's with the smallest of its family."""
    for seed in range(25 * part, 25 * part + 25):
        choose = random.Random(seed)
        facts, profile = draw(make_facts, make_profile, choose, choose.randint(1, 8))
        facts = draw_varied(facts, choose) if choose.random() < 0.7 else facts
        policy = draw_policy(facts, choose, choose.choice((1, 1, 2, 3)))
        problem = Problem(facts, profile, used_by(policy, facts), Shape(), 1.0, 10, accumulation=policy.accumulation)
        residents = frozenset(layer.index for layer in policy.layers if layer.resident)
        for shape, whole in ((Shape(policy.weight_slots, policy.staging_slots, residents), True), (Shape(2, 1), False)):
            seen = replace(problem, shape=shape, residents=(0, 0) if whole else (len(residents), len(facts.layers)))
            assert has_room(Choices(Model("memory"), seen, whole=whole), policy), (seed, whole)


def has_room(choices: Choices, policy: Policy) -> bool:
    """Whether the policy is one of those between which is to be chosen."""
    homes, kept = policy.homes, {(x.index, x.internals, x.internals_home) for x in policy.layers}
    blocks = set(itertools.pairwise(i for i, home in enumerate(homes) if home != "recompute"))
    if any(key[1] != "none" and key not in choices.kept for key in kept):
        return False
    chosen: list[tuple[Any, bool]] = [
        (variable, edge in blocks and away == (homes[edge[0]] != "gpu"))
        for edge, variables in choices.edges.items()
        for away, variable in enumerate(variables)
    ]
    chosen += [(0.0 if v is None else v, homes[i] == "nvme") for i, v in enumerate(choices.nvme)]
    chosen += [(variable, key in kept) for key, variable in choices.kept.items()]
    for variable, wanted in chosen:
        choices.model.add_linear_constraint(fast_sum([variable]) == float(wanted))
    return run_solver(choices.model, "highs", 60.0, 0.0).values is not None


def assert_no_faster(policy: Policy, facts: ModelFacts, profile: HardwareProfile) -> None:
    """The bound with the policy's counts and memory is not above its simulated step time."""
    accumulation, budgets = policy.accumulation, used_by(policy, facts)
    expected = simulate(policy, facts, profile).step_s
    problem = Problem(facts, profile, budgets, Shape(), expected * 1.0001, 10)
    problem = replace(problem, accumulation=min(2, accumulation), repeats=max(0, accumulation - 2))
    sizes = parkable(facts, problem.optimizer, problem.accumulation)
    most = most_spared_bytes(sizes) if Parking.of(policy, facts) != NOTHING else 0
    family = Family(WEIGHT_SLOTS, STAGING_SLOTS, residents=(0, len(facts.layers)))
    seen = replace(problem, shape=family.smallest, residents=family.residents, parked_bytes=most)
    model = Model("bound")
    choices = Choices(model, seen, whole=False)
    timing = LooseTiming(choices, family)
    told = count(policy, facts)
    for group, total in choices.totals.items():
        if group[0] == "kept":
            model.add_linear_constraint(total == told.kept.get(group[1:], 0))
        elif group[0] == "block" and group[1] > 1:
            model.add_linear_constraint(total == told.blocks.get(group[1], 0))
        elif group == ("nvme",):
            model.add_linear_constraint(total == told.nvme)
    model.minimize(timing.step)
    answer = run_solver(model, "highs", 60.0, 0.0)
    assert answer.values is not None, answer.status
    assert answer.bound * problem.horizon_s <= expected * (1 + 1e-6)


def test_host_memory_from_nvme_costs_the_time_of_its_transfers(make_facts: Make, make_profile: Machine) -> None:
    """State that does not fit is read before the last layer's forward is over: no bound is below that."""
    facts, profile = make_facts(8, flops=1e9), make_profile(nvme_bytes=1 << 34, nvme_read_bytes_s=1e7)
    short = 8 * MIB
    problem = Problem(facts, profile, Budgets.of(profile), Shape(), 1e3, 8)
    problem = replace(problem, budgets=Budgets.of(profile, host_memory=problem.state_bytes - short))
    found = bound_of(problem, next(families_of(problem)), backend="highs", deadline=later())
    assert found.counts is not None and found.counts.parked_bytes >= short
    backward_s = 8 * 2 * 1e9 / 1e12
    assert found.bound_s >= short / 1e7 + backward_s


def test_gradients_are_written_after_all_states(make_facts: Make, make_profile: Machine) -> None:
    """Where nearly all of both is on NVMe a step takes at least all reads, and the writes of the gradients."""
    facts, profile = make_facts(20, flops=1e9), make_profile(nvme_bytes=1 << 34, nvme_read_bytes_s=1e7)
    profile = profile.model_copy(update={"nvme_write_bytes_s": 1e7})
    problem = Problem(facts, profile, Budgets.of(profile), Shape(), 1e3, 8)
    states, gradients = (sum(kind) for kind in parkable(facts, problem.optimizer))
    most = most_spared_bytes(parkable(facts, problem.optimizer))
    problem = replace(problem, budgets=Budgets.of(profile, host_memory=problem.state_bytes - most))
    found = bound_of(problem, next(families_of(problem)), backend="highs", deadline=later())
    last_state_s = states / 20 / 1e7
    assert found.bound_s >= ((states + gradients) / 1e7 + last_state_s + gradients / 1e7) * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(24))
def test_the_bound_of_its_family_is_not_above_a_policy(make_facts: Make, make_profile: Machine, seed: int) -> None:
    """Whose memory is full, or only the GPU's; some with more micro-batches, or with state on NVMe."""
    choose = random.Random(seed)
    facts, profile = draw(make_facts, make_profile, choose, choose.randint(2, 7))
    policy = draw_policy(facts, choose, 1)
    budgets = used_by(policy, facts).model_copy(update={"host_bytes": 1 << 34, "nvme_bytes": 1 << 30})
    if seed % 2:
        facts = draw_varied(facts, choose)
        policy = draw_policy(facts, choose, choose.choice((1, 2, 3)))
        if choose.random() < 0.4:
            policy = park(policy, facts, Parking(*(choose.randint(0, len(facts.layers)) for _ in range(2))))
        budgets = used_by(policy, facts)
    expected = simulate(policy, facts, profile).step_s
    repeats = max(0, policy.accumulation - 2)
    problem = Problem(facts, profile, budgets, Shape(), expected * 1.01, 10, policy.accumulation - repeats, repeats)
    (home,) = [family for family in families_of(problem) if holds(family, policy, facts)]
    for how in ({}, {"rough": True}, {"whole": True})[: 3 if seed < 12 else 2]:
        found = bound_of(problem, home, backend="highs", deadline=later(), **how)
        assert found.bound_s <= expected * (1 + 1e-6), how


def test_the_bounds_of_parts_and_of_whole_layers_are_below_what_is_possible(
    make_facts: Make, make_profile: Machine
) -> None:
    """With its presolve HiGHS has these of whole layers above the fastest policy."""
    facts, profile = make_facts(8, flops=5e9, workspace=2 * MIB), make_profile(h2d_bytes_s=4e9, d2h_bytes_s=4e9)
    budgets = Budgets(gpu_bytes=24 * MIB, host_bytes=1 << 34, nvme_bytes=0)
    problem, family = Problem(facts, profile, budgets, Shape(), 1.0, 1), Family((2, 2), (2, 2))
    parts, wholes = (
        bound_of(problem, family, backend="highs", deadline=later(), whole=whole).bound_s for whole in (False, True)
    )
    fastest_s = solve_exact(replace(problem, shape=Shape(2, 2)), gap=1e-6).step_s
    backwards_s = 8 * (5e9 * 4) / 1e12
    assert fastest_s and backwards_s <= min(parts, wholes) * (1 + 1e-6) and max(parts, wholes) <= fastest_s


@pytest.mark.parametrize("seed", range(4))
def test_second_solver_agrees(make_facts: Make, make_profile: Machine, seed: int) -> None:
    choose = random.Random(seed)
    facts, profile = draw(make_facts, make_profile, choose, 6)
    budgets = Budgets(gpu_bytes=choose.randint(30, 60) * MIB, host_bytes=1 << 34, nvme_bytes=0)
    problem = Problem(facts, profile, budgets, Shape(), 0.2, 6)
    families = list(families_of(problem))
    bounds = [
        [bound_of(problem, family, backend=name, deadline=later()).bound_s for family in families]
        for name in ("highs", "gscip")
    ]
    assert bounds[0] == pytest.approx(bounds[1], rel=0.005)


@pytest.mark.parametrize("seed", range(40))
def test_every_policy_is_in_exactly_one_family_and_in_one_of_its_parts(
    make_facts: Make, make_profile: Machine, seed: int
) -> None:
    choose = random.Random(seed)
    facts, profile = draw(make_facts, make_profile, choose, choose.randint(2, 10))
    policy = draw_policy(facts, choose, 1)
    budgets = Budgets(gpu_bytes=lower(policy, facts).peak_bytes("gpu"), host_bytes=1 << 34, nvme_bytes=1 << 30)
    families = list(families_of(Problem(facts, profile, budgets, Shape(), 1.0, 10)))
    while families:
        (home,) = [family for family in families if holds(family, policy, facts)]
        families = parts_of(home)
    assert home.weights == (policy.weight_slots,) * 2 and home.staging == (policy.staging_slots,) * 2


def holds(family: Family, policy: Policy, facts: ModelFacts) -> bool:
    told = count(policy, facts)
    numbers = {
        "weights": policy.weight_slots, "staging": policy.staging_slots, "residents": told.resident,
        "nvme": told.nvme, "blocks": sum(told.blocks.values()), "parked": int(Parking.of(policy, facts) != NOTHING),
    }  # fmt: skip
    return all(getattr(family, name)[0] <= number <= getattr(family, name)[1] for name, number in numbers.items())


def test_the_bound_of_a_part_is_no_lower(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(8, flops=5e9, workspace=8 * MIB), make_profile(h2d_bytes_s=2e9, d2h_bytes_s=2e9)
    budgets = Budgets(gpu_bytes=44 * MIB, host_bytes=1 << 34, nvme_bytes=0)
    problem = Problem(facts, profile, budgets, Shape(), 0.3)
    family = next(families_of(problem))
    while parts := parts_of(family):
        whole, *halves = [bound_of(problem, one, backend="highs", deadline=later()).bound_s for one in (family, *parts)]
        assert min(halves) >= whole * (1 - 0.003)
        family = parts[1]


def later() -> float:
    return time.monotonic() + 60


def test_a_certificate_goes_on_where_one_family_cannot_be_looked_at_more_closely() -> None:
    """What is closed still bounds, and what is open is taken next."""
    near, far = Family((2, 2), (1, 1)), Family((3, 3), (1, 1))
    certificate = Certificate()
    certificate.add(Bound(near, 1.0))
    certificate.add(Bound(far, 1.5))
    certificate.close(certificate.take())
    assert (certificate.bound_s, certificate.open_s) == (1.0, 1.5)
    assert certificate.take().family == far
    assert (certificate.bound_s, certificate.open_s) == (1.0, math.inf)
