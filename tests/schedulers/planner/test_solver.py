"""What one solver says, and two ways of asking it, are one answer: no better than the worse of the two proofs."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ortools.math_opt.python import mathopt

from lazytrain.schedulers.planner import solver
from lazytrain.schedulers.planner.linear import Model
from lazytrain.schedulers.planner.solver import Answer, SolverFailed, run_solver


def knapsack() -> Model:
    """The least of 3a + 4b + 5c where they weigh 7 or more: 5 for c alone is too light, so 8 for a and c."""
    model = Model("knapsack")
    a, b, c = (model.add_binary_variable() for _ in range(3))
    model.add_linear_constraint(2 * a + 3 * b + 5 * c >= 7)
    model.minimize(3 * a + 4 * b + 5 * c)
    return model


def asked_twice(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> Answer:
    left = list(answers)
    monkeypatch.setattr(solver, "_solve", lambda *_: left.pop(0))
    return run_solver(Model("nothing"), "highs", 1.0, 0.01, twice=True)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("backend", ["highs", "gscip"])
def test_an_optimum_is_its_own_bound(backend: str, twice: bool) -> None:
    answer = run_solver(knapsack(), backend, 10.0, 1e-6, twice=twice)
    assert answer.status == "OPTIMAL" and answer.values is not None
    assert (answer.objective, answer.bound) == (pytest.approx(8.0), pytest.approx(8.0))


def test_what_proves_less_counts_and_the_better_solution_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way may take the optimum away: a solution of one is no less true for what the other proves."""
    lost = Answer("OPTIMAL", 5.2, 5.2, [1.0], 10)
    open_ = Answer("FEASIBLE", 4.9, 5.5, [2.0], 7)
    none = Answer("NO_SOLUTION", 4.8, iterations=5)
    refused = Answer("INFEASIBLE", math.inf, iterations=1)
    for ways in ((lost, open_), (open_, lost)):
        assert asked_twice(monkeypatch, *ways) == Answer("FEASIBLE", 4.9, 5.2, [1.0], 17)
    for ways in ((lost, none), (none, lost)):
        assert asked_twice(monkeypatch, *ways) == Answer("FEASIBLE", 4.8, 5.2, [1.0], 15)
    for ways in ((lost, refused), (refused, lost)):
        assert asked_twice(monkeypatch, *ways) == Answer("OPTIMAL", 5.2, 5.2, [1.0], 11)
    assert asked_twice(monkeypatch, refused, none) == Answer("NO_SOLUTION", 4.8, iterations=6)
    assert asked_twice(monkeypatch, refused, refused) == Answer("INFEASIBLE", math.inf, iterations=2)


def test_two_ways_take_no_longer_than_one_may(monkeypatch: pytest.MonkeyPatch) -> None:
    now, solve = [0.0], mathopt.solve
    limits: list[float] = []

    def slow(model: Any, kind: Any, *, params: Any) -> Any:
        limits.append(params.time_limit.total_seconds())
        now[0] += 3.0
        return solve(model, kind)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(mathopt, "solve", slow)
    run_solver(knapsack(), "highs", 4.0, 0.01, twice=True)
    run_solver(knapsack(), "highs", 2.0, 0.01, twice=True)
    assert limits == [4.0, 1.0, 2.0, 0.0]


def test_a_solver_that_stops_for_reasons_of_its_own_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it has where it raises: the callers then know nothing of the model, and go on."""
    stopped = SimpleNamespace(
        termination=SimpleNamespace(reason=mathopt.TerminationReason.NUMERICAL_ERROR, detail="overflow"),
        has_primal_feasible_solution=lambda: False,
    )
    monkeypatch.setattr(mathopt, "solve", lambda *_, **__: stopped)
    with pytest.raises(SolverFailed, match="NUMERICAL_ERROR"):
        run_solver(knapsack(), "highs", 1.0, 0.01)


NOISY = """
import ctypes, threading
from ortools.math_opt.python import mathopt
from lazytrain.schedulers.planner.linear import Model
from lazytrain.schedulers.planner.solver import run_solver

solve, libc, inside, said = mathopt.solve, ctypes.CDLL(None), threading.Event(), threading.Event()

def noisy(*args, **named):
    libc.printf(b"noise\\n")
    inside.set()
    said.wait()
    return solve(*args, **named)

mathopt.solve = noisy
solving = [threading.Thread(target=run_solver, args=(Model("nothing"), "highs", 1.0, 0.1)) for _ in range(2)]
for thread in solving:
    thread.start()
inside.wait()
print("heard", flush=True)
said.set()
for thread in solving:
    thread.join()
libc.printf(b"again\\n")
"""


def test_what_a_solver_prints_is_not_on_stdout_and_what_others_print_meanwhile_is() -> None:
    """Two threads that solve at once, one that prints; C's own buffers are written when the process ends."""
    done = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["heard", "again"]
    assert done.stderr.split() == ["noise", "noise"]


ONE = """
import sys
from lazytrain.schedulers.planner.linear import Model
from lazytrain.schedulers.planner.solver import run_solver
model = Model("one")
model.minimize(model.add_binary_variable())
assert run_solver(model, sys.argv[1], 10.0, 0.0).status == "OPTIMAL"
"""


@pytest.mark.parametrize("backend", ["highs", "gscip"])
def test_ctrl_c_is_the_programs_own_after_a_solver_has_run(backend: str, hears_ctrl_c: Callable[..., bool]) -> None:
    assert hears_ctrl_c(ONE, backend)
