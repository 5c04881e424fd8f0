"""A walk's small changes take as long, and need as much memory, as the exact program and the simulator say."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import Policy
from lazytrain.schedulers.baselines import shortages
from lazytrain.schedulers.hardware import Budgets, HardwareProfile
from lazytrain.schedulers.planner.counts import Counts
from lazytrain.schedulers.planner.exact import solve_exact
from lazytrain.schedulers.planner.plan import plan
from lazytrain.schedulers.planner.problem import Problem, Shape
from lazytrain.schedulers.planner.solver import run_solver
from lazytrain.schedulers.planner.walk import FITS, State, Walk, moved
from lazytrain.schedulers.simulator import simulate

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]
PLENTY = Budgets(gpu_bytes=1 << 34, host_bytes=1 << 36, nvme_bytes=1 << 34)


def draw(
    make_facts: Make, make_profile: Machine, choose: random.Random, budgets: Budgets, accumulation: int
) -> Problem:
    flops = choose.choice((3e9, tuple(choose.uniform(0.5, 8) * 1e9 for _ in range(9))))
    facts = make_facts(9, flops=list(flops) if isinstance(flops, tuple) else flops, workspace=8 * MIB)
    rates = {name: choose.choice((0.5e9, 2e9)) for name in ("h2d_bytes_s", "d2h_bytes_s", "nvme_read_bytes_s")}
    shape = Shape(choose.choice((2, 3)), choose.choice((1, 2, 3)), frozenset({4} if choose.random() < 0.3 else ()))
    horizon_s = 5 * simulate(Policy.from_homes(facts, ["gpu"] * 10), facts, make_profile(**rates)).step_s
    return Problem(
        facts, make_profile(**rates), budgets, shape, horizon_s, 1 if budgets.nvme_bytes else 4, accumulation
    )


def somewhere(walk: Walk, choose: random.Random) -> State:
    """Where a few changes lead to, any that may be made, from all boundaries on the GPU."""
    state: State = (("gpu", None),) * walk.layers
    for _ in range(choose.randint(0, 14)):
        state = moved(state, choose.choice(walk.changes(state, 0))[0])
    return state


@pytest.mark.parametrize("seed", range(10))
def test_a_change_takes_as_long_as_in_the_simulator(make_facts: Make, make_profile: Machine, seed: int) -> None:
    """Recomputed blocks, internals kept and swapped, boundaries on NVMe, one micro-batch or two."""
    choose = random.Random(seed)
    budgets = PLENTY if seed % 2 else PLENTY.model_copy(update={"nvme_bytes": 0})
    problem = draw(make_facts, make_profile, choose, budgets, choose.choice((1, 1, 2)))
    walk = Walk(problem)
    state = somewhere(walk, choose)
    drawn = choose.sample(walk.changes(state, 0), 12)
    chosen = walk.chosen(state)
    assert chosen is not None
    least = walk.rows.least(walk.rows.base(chosen), [change for _, change in drawn])
    for (move, _), step in zip(drawn, least.step, strict=True):
        policy = walk.policy(moved(state, move))
        assert walk.state(policy) == moved(state, move)
        expected = simulate(policy, problem.facts, problem.profile).step_s
        assert step * problem.horizon_s == pytest.approx(expected, rel=1e-5)
    assert max(least.beyond) <= FITS


@pytest.mark.parametrize("seed", range(6))
def test_what_does_not_fit_is_what_the_solver_refuses(make_facts: Make, make_profile: Machine, seed: int) -> None:
    choose = random.Random(seed)
    budgets = Budgets(
        gpu_bytes=choose.randint(24, 44) * MIB, host_bytes=1 << 34, nvme_bytes=choose.choice((0, 4 * MIB))
    )
    walk = Walk(draw(make_facts, make_profile, choose, budgets, 1))
    state = somewhere(walk, choose)
    chosen = walk.chosen(state)
    assert chosen is not None
    drawn = choose.sample(walk.changes(state, 0), 8)
    least = walk.rows.least(walk.rows.base(chosen), [change for _, change in drawn])
    for (_, (gone, come)), beyond in zip(drawn, least.beyond, strict=True):
        ones = chosen - set(gone) | set(come)
        model = walk.choices.model
        for variable in (variable for variable, whole in enumerate(model.whole) if whole):
            model.lower[variable] = model.upper[variable] = float(variable in ones)
        assert (run_solver(model, "highs", 60.0, 0.0).values is not None) == (beyond <= FITS)


def test_a_walk_ends_no_slower_than_it_began_and_within_the_memory(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(24, flops=5e9, workspace=8 * MIB)
    profile, budgets = (
        make_profile(h2d_bytes_s=2e9, d2h_bytes_s=2e9),
        Budgets(gpu_bytes=80 * MIB, host_bytes=1 << 34, nvme_bytes=0),
    )
    start = Policy.from_homes(facts, ["host"] * 24 + ["gpu"], weight_slots=2).model_copy(update={"staging_slots": 3})
    first_s = simulate(start, facts, profile).step_s
    problem = Problem(facts, profile, budgets, Shape(2, 3), first_s, 1)
    found = [walk.best(walk.state(start)) for walk in (Walk(problem), Walk(problem))]
    assert found[0] is not None and found[0] == found[1]  # the same again
    policy = Walk(problem).policy(found[0])
    assert shortages(policy, facts, budgets) == []
    exact = solve_exact(problem, gap=0.01)
    assert simulate(policy, facts, profile).step_s <= min(0.97 * first_s, (exact.step_s or first_s) * 1.01)


def test_a_walk_that_begins_beyond_the_memory_comes_back(make_facts: Make, make_profile: Machine) -> None:
    """Where all internals are kept on the GPU."""
    facts = make_facts(24, flops=5e9, workspace=8 * MIB)
    profile, budgets = (
        make_profile(h2d_bytes_s=2e9, d2h_bytes_s=2e9),
        Budgets(gpu_bytes=80 * MIB, host_bytes=1 << 34, nvme_bytes=0),
    )
    walk = Walk(Problem(facts, profile, budgets, Shape(2, 3), 1.0, 1))
    start = walk.spread(Counts(kept={(0, "all", "gpu"): 12, (0, "matmuls", "host"): 12}))
    assert [what for _, what in start].count(("matmuls", "host")) == 12
    found = walk.best(start)
    assert found is not None and shortages(walk.policy(found), facts, budgets) == []


def test_a_walk_begins_with_as_much_on_the_host_as_there_is_room_for(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(20), make_profile()
    problem = Problem(facts, profile, PLENTY, Shape(3, 3), 1.0, 1)
    kept, largest = facts.layers[0].kept_bytes("matmuls"), max(facts.boundary_bytes)
    room = problem.state_bytes + 2 * kept + 5 * largest + largest // 2
    walk = Walk(replace(problem, budgets=PLENTY.model_copy(update={"host_bytes": room})))
    start = walk.spread(Counts(kept={(0, "matmuls", "host"): 2}, nvme=3))
    homes = [home for home, _ in start]
    assert (homes.count("nvme"), homes.count("host"), homes.count("gpu")) == (3, 5, 12)


def test_long_chains_are_proven_to_a_percent(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(24, flops=5e9, workspace=8 * MIB)
    profile = make_profile(h2d_bytes_s=2e9, d2h_bytes_s=2e9)
    answer = plan(facts, profile, gpu_memory=80 * MIB, solve_seconds=120.0, baselines=False)
    assert answer.solver is not None and answer.solver.status == "OPTIMAL" and not answer.solver.out_of_time


def test_blocks_that_recompute_beside_nvme_have_no_order_of_rows(make_facts: Make, make_profile: Machine) -> None:
    with pytest.raises(ValueError, match="no order"):
        Walk(Problem(make_facts(6), make_profile(), PLENTY, Shape(), 1.0, 4))
