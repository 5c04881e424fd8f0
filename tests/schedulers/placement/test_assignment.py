"""The solver's choice against every possible one; the greedy rule where there is no time."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations

import pytest

from lazytrain.schedulers.placement import assignment
from lazytrain.schedulers.placement.assignment import UNIT, Bid, Limit, Problem, Seat, choose, greedy


def exhaustive(problem: Problem) -> int:
    """The highest worth of all subsets of bids that are allowed."""
    bids = range(len(problem.bids))
    subsets = (chosen for size in range(len(problem.bids) + 1) for chosen in combinations(bids, size))
    return max(problem.worth(chosen) for chosen in subsets if problem.allowed(chosen))


def random_problem(seed: int, bids: int = 9) -> Problem:
    """Up to five jobs for three nodes with running neighbours, GPUs, memory, and links that may become too full."""
    draw = random.Random(seed)
    seats = tuple(Seat(name, draw.randint(0, 2), {"dram": draw.randint(0, UNIT)}) for name in "abc")
    made = tuple(
        Bid(
            f"job-{draw.randint(0, 4)}",
            draw.choice("abc"),
            draw.randint(1, 3 * UNIT),
            {"dram": draw.randint(0, UNIT), "h2d": draw.randint(0, UNIT)},
        )
        for _ in range(bids)
    )
    limits = [Limit({i: 1 for i, bid in enumerate(made) if bid.job == f"job-{j}"}, 1) for j in range(5)]
    for seat in seats:
        here = [i for i, bid in enumerate(made) if bid.seat == seat.name]
        limits += [Limit(dict.fromkeys(here, 1), draw.randint(1, 3)), Limit({i: draw.randint(1, 9) for i in here}, 12)]
    return Problem(seats, made, tuple(limits), crowding=draw.randint(0, 2 * UNIT))


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    problem = random_problem(seed)
    choice = choose(problem, seconds=20)
    assert choice.status == "OPTIMAL"
    assert problem.allowed(choice.bids)
    assert choice.objective == problem.worth(choice.bids) == exhaustive(problem)


def test_greedy_is_allowed_and_sometimes_worse() -> None:
    problems = [random_problem(seed) for seed in range(40)]
    assert all(problem.allowed(greedy(problem)) for problem in problems)
    best = [choose(problem, seconds=20).objective for problem in problems]
    rule = [problem.worth(greedy(problem)) for problem in problems]
    assert all(found >= simple for found, simple in zip(best, rule, strict=True))
    assert sum(best) > sum(rule)


@pytest.mark.parametrize("limits", [{"seconds": 0.0}, {"seconds": 20.0, "effort": 0.0}])
def test_without_time_the_greedy_rule_decides(limits: dict[str, float]) -> None:
    problem = random_problem(3)
    choice = choose(problem, **limits)
    assert (choice.status, choice.bids) == ("FALLBACK", greedy(problem))


def test_a_solver_that_finds_nothing_is_no_proof_that_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(3)
    monkeypatch.setattr(assignment.cp_model.CpSolver, "solve", lambda self, model: assignment.cp_model.UNKNOWN)
    monkeypatch.setattr(assignment.cp_model.CpSolver, "deterministic_time", 1.0)
    choice = choose(problem, seconds=20)
    assert (choice.status, choice.bids, choice.effort) == ("FALLBACK", greedy(problem), 1.0)


def test_jobs_that_fill_the_same_link_are_kept_apart() -> None:
    """Two that stream and two that compute, on two nodes: each node gets one of each."""
    bids = tuple(
        Bid(job, seat, UNIT, {"dram": 7000 if job.startswith("stream") else 1000})
        for job in ("stream-1", "stream-2", "compute-1", "compute-2")
        for seat in ("a", "b")
    )
    limits = [Limit({i: 1 for i, bid in enumerate(bids) if bid.job == job}, 1) for job in {bid.job for bid in bids}]
    limits += [Limit({i: 1 for i, bid in enumerate(bids) if bid.seat == seat}, 2) for seat in "ab"]
    choice = choose(Problem((Seat("a"), Seat("b")), bids, tuple(limits)), seconds=20)
    together = {seat: sorted(bids[i].job.split("-")[0] for i in choice.bids if bids[i].seat == seat) for seat in "ab"}
    assert together == {"a": ["compute", "stream"], "b": ["compute", "stream"]}


def test_nothing_to_choose() -> None:
    assert choose(Problem((), (), ()), seconds=1).status == "NOTHING"


ONE = """
from lazytrain.schedulers.placement.assignment import Bid, Problem, Seat, choose
assert choose(Problem((Seat("a"),), (Bid("job", "a", 1),), ()), seconds=20).status == "OPTIMAL"
"""


def test_ctrl_c_is_the_programs_own_after_the_solver_has_run(hears_ctrl_c: Callable[..., bool]) -> None:
    """The solver would take the signal for itself, and leave it to end the process afterwards."""
    assert hears_ctrl_c(ONE)
