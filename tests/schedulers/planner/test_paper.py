"""The paper's planner against brute force, a second solver, and the schedule that was published."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from ortools.math_opt.python import mathopt
from scipy.optimize import linprog

from lazytrain.jobs.errors import InputError, LazytrainError, ProgramError
from lazytrain.jobs.policy.artifact import Home
from lazytrain.schedulers.planner import Instance, Link, least_bytes, price, solve

RandomInstance = Callable[..., Instance]
TIERS: tuple[Home, ...] = ("gpu", "host", "nvme", "recompute")


def window_program(sizes: tuple[int, ...], moved: tuple[int, ...], link: Link) -> float:
    """Exposed seconds of the boundaries ``moved`` over one link: the paper's windows, written out as it states them.

    Variables t(i, w) for w >= i and eps(w); sum over w of t(i, w) = A_i; sum over i of t(i, w) + mandatory(w) <=
    capacity(w) + eps(w); charged is eps(w) - max(0, mandatory(w) - capacity(w)).
    """
    windows = len(link.capacity)
    pairs = [(i, w) for i in moved for w in range(i, windows)]
    if not pairs:
        return 0.0
    floor = [max(0.0, m - c) for m, c in zip(link.mandatory, link.capacity, strict=True)]
    cost = np.array([0.0] * len(pairs) + [1.0] * windows)
    sums = np.array([[float(i == j) for j, _ in pairs] + [0.0] * windows for i in moved])
    rows = [[float(w == v) for _, v in pairs] + [-float(w == v) for v in range(windows)] for w in range(windows)]
    result = linprog(
        cost,
        A_ub=np.array(rows),
        b_ub=np.array(link.capacity) - np.array(link.mandatory),
        A_eq=sums,
        b_eq=np.array([sizes[i] for i in moved], dtype=float),
        bounds=[(0, None)] * len(pairs) + [(low, None) for low in floor],
    )
    assert result.status == 0
    return float(result.fun - sum(floor)) / link.bytes_s


def schedules(instance: Instance) -> Iterator[tuple[Home, ...]]:
    """Every schedule within the budgets and the longest block."""
    for inner in product(TIERS, repeat=instance.layers - 1):
        homes: tuple[Home, ...] = ("gpu", *inner, "gpu")
        kept = [i for i, home in enumerate(homes) if home != "recompute"]
        if max(b - a for a, b in pairwise(kept)) > instance.longest_block:
            continue
        used = {t: sum(s for s, h in zip(instance.sizes, homes, strict=True) if h == t) for t in TIERS}
        if all(used[tier] <= budget for tier, budget in instance.budgets.by_tier().items()):
            yield homes


def edge_cost(instance: Instance, homes: tuple[Home, ...]) -> float:
    """Recompute cost edge by edge, R(s, e) = rho_s + .. + rho_(e-2), and the tie-breakers."""
    kept = [i for i, home in enumerate(homes) if home != "recompute"]
    recompute = sum(instance.forward_s[j] for s, e in pairwise(kept) for j in range(s, e - 1))
    return recompute + instance.materialised_s * len(kept) + instance.nvme_s * homes.count("nvme")


def costs(instance: Instance) -> Callable[[tuple[Home, ...]], float]:
    @cache
    def exposed(name: str, moved: tuple[int, ...]) -> float:
        return window_program(instance.sizes, moved, instance.links[name])

    def cost(homes: tuple[Home, ...]) -> float:
        off = tuple(i for i, home in enumerate(homes) if home in ("host", "nvme"))
        nvme = tuple(i for i, home in enumerate(homes) if home == "nvme")
        links = exposed("d2h", off) + exposed("h2d", off) + exposed("nvme_write", nvme) + exposed("nvme_read", nvme)
        return edge_cost(instance, homes) + links

    return cost


@pytest.mark.parametrize("layers", range(1, 8))
def test_equals_brute_force_on_random_chains(random_instance: RandomInstance, layers: int) -> None:
    infeasible = 0
    for seed in range(24 if layers < 6 else 12):
        instance = random_instance(1000 * layers + seed, layers, equal=seed % 2 == 0)
        cost = costs(instance)
        best = min(map(cost, schedules(instance)), default=None)
        solution = solve(instance)
        if best is None:
            assert solution.status == "INFEASIBLE" and solution.homes == ()
            infeasible += 1
            continue
        assert solution.status == "OPTIMAL"
        assert solution.objective_s == pytest.approx(best, abs=1e-6)
        assert cost(solution.homes) == pytest.approx(best, abs=1e-6)
        assert solution.gap == pytest.approx(0.0, abs=1e-6)
    assert infeasible < 12


@pytest.mark.parametrize("layers", [3, 5, 6])
def test_price_equals_the_written_out_windows_for_every_schedule(random_instance: RandomInstance, layers: int) -> None:
    instance = random_instance(7 * layers, layers, tight=3.0)
    cost = costs(instance)
    for homes in schedules(instance):
        assert price(instance, homes).objective_s == pytest.approx(cost(homes), abs=1e-6)


@pytest.mark.parametrize("budgets", ["15/32", "8/32", "8/8", "0/32", "30/0", "4/4"])
@pytest.mark.parametrize("window_forwards", [4.0, 0.5])
def test_two_solvers_agree_on_64_layers(published: Any, budgets: str, window_forwards: float) -> None:
    """Half a forward per window leaves so little room that the links decide; with four, the budgets do."""
    instance = published.instance(budgets, window_forwards)
    first, second = solve(instance), solve(instance, backend="gscip")
    assert first.status == second.status == "OPTIMAL"
    assert first.objective_s == pytest.approx(second.objective_s, rel=1e-7)
    assert first.gap == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("seed", range(6))
def test_two_solvers_agree_on_random_chains_of_64_layers(random_instance: RandomInstance, seed: int) -> None:
    instance = replace(random_instance(seed, 64, equal=seed % 2 == 0), longest_block=8)
    first, second = solve(instance), solve(instance, backend="gscip")
    assert first.status == second.status
    if first.status == "OPTIMAL":
        assert first.objective_s == pytest.approx(second.objective_s, rel=1e-6)


def test_never_worse_than_the_published_schedule(published: Any) -> None:
    homes = published.schedule
    assert {tier: homes.count(tier) for tier in TIERS} == {"gpu": 30, "host": 21, "nvme": 1, "recompute": 13}
    for window_forwards in (4.0, 1.0, 0.5):
        instance = published.instance(published.constants["published"]["budgets"], window_forwards)
        theirs = price(instance, homes)
        assert solve(instance).objective_s <= theirs.objective_s
        assert theirs.recompute_s == pytest.approx(
            sum(instance.forward_s[i - 1] for i, h in enumerate(homes) if h == "recompute")
        )


def test_more_memory_is_never_slower(random_instance: RandomInstance) -> None:
    for seed in range(12):
        instance = random_instance(seed, 10, equal=seed % 2 == 0)
        for tier in ("gpu_bytes", "host_bytes", "nvme_bytes"):
            last = float("inf")
            for more in range(0, 12, 3):
                budgets = instance.budgets.model_copy(update={tier: getattr(instance.budgets, tier) + more})
                now = solve(instance.with_budgets(budgets)).objective_s
                now = float("inf") if now is None else now
                assert now <= last + 1e-9
                last = now


def test_the_same_question_gets_the_same_answer(published: Any) -> None:
    instance = published.instance("8/8", 0.5)
    first, second = solve(instance), solve(instance)
    assert (first.homes, first.objective_s, first.bound_s) == (second.homes, second.objective_s, second.bound_s)


def test_least_bytes_are_what_makes_a_schedule_possible(random_instance: RandomInstance) -> None:
    found = 0
    for seed in range(40):
        instance = random_instance(seed, 6, tight=0.3)
        if solve(instance).status != "INFEASIBLE":
            continue
        for tier in ("gpu", "host", "nvme"):
            need = least_bytes(instance, tier)  # type: ignore[arg-type]
            if need is None:
                continue
            found += 1
            for size, status in ((need, "OPTIMAL"), (need - 1, "INFEASIBLE")):
                budgets = instance.budgets.model_copy(update={f"{tier}_bytes": size})
                assert solve(instance.with_budgets(budgets)).status == status
    assert found > 10


def test_out_of_time_is_not_infeasible(published: Any) -> None:
    solution = solve(published.instance("8/8", 0.5), seconds=0.0)
    assert solution.status in ("NO_SOLUTION", "FEASIBLE")


def test_schedules_that_are_none_are_not_priced(random_instance: RandomInstance) -> None:
    instance = replace(random_instance(3, 4, tight=9.0), longest_block=2)
    for homes in (("gpu",) * 4, ("host", *["gpu"] * 4), ("gpu", *["recompute"] * 3, "gpu")):
        with pytest.raises(ProgramError):
            price(instance, homes)  # type: ignore[arg-type]
    small = instance.with_budgets(instance.budgets.model_copy(update={"host_bytes": 0}))
    with pytest.raises(ProgramError, match="on host"):
        price(small, ("gpu", "host", "gpu", "gpu", "gpu"))


def test_unknown_backends_and_solver_crashes_are_named(
    random_instance: RandomInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="cplex"):
        solve(random_instance(1, 4), backend="cplex")

    def crash(*_: object, **__: object) -> None:
        raise AttributeError("canonical_code")

    monkeypatch.setattr(mathopt, "solve", crash)
    with pytest.raises(LazytrainError, match="highs failed: canonical_code") as caught:
        solve(random_instance(1, 4))
    assert "gscip" in caught.value.hint
