"""The full planning problem, solved for one shape: `choices` and `timing` put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ...jobs.policy import Policy
from .choices import Choices
from .linear import Model, fast_sum
from .problem import FEW_LAYERS, Problem
from .solver import MODEL_WORK, WHOLE_WORK, Answer, SolverFailed, Status, run_solver, work_of
from .timing import Timing

REFUSED: Final = 8
"""Policies that are left out, one after the other, because they do not fit."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The solver's answer. ``INFEASIBLE`` means that nothing is as fast as the problem's horizon."""

    status: Status
    policy: Policy | None = None
    step_s: float | None = None
    """Step time of ``policy``."""
    bound_s: float = 0.0
    """No policy of this shape is faster."""
    work: int = 0
    """As in `solver.work_of`."""


def solve_exact(
    problem: Problem,
    *,
    backend: str = "highs",
    seconds: float = 20.0,
    gap: float = 0.004,
    nodes: int | None = None,
    enough_s: float = 0.0,
    quick: bool = False,
    fits: Callable[[Policy], bool] | None = None,
) -> Exact:
    """The fastest policy of the problem's shape, to within ``gap``; or the first that takes no more than ``enough_s``.

    ``nodes`` limits the solver's search tree, ``seconds`` all of it; ``quick`` is as in `run_solver`. The program
    counts a little less memory here and there than is taken: a policy of which ``fits`` says that it does not is left
    out, and the next is looked for, `REFUSED` times.
    """
    deadline = time.monotonic() + seconds
    model = Model(name="lazytrain-full")
    choices = Choices(model, problem)
    timing = Timing(choices)
    model.minimize(timing.step)
    enough, twice, work = enough_s / problem.horizon_s, len(problem.facts.layers) <= FEW_LAYERS, 0
    for turn in range(1 + REFUSED):
        try:
            left = deadline - time.monotonic()
            answer = run_solver(model, backend, left, gap, nodes, enough, quick=quick, twice=twice)
        except SolverFailed:
            return Exact("NO_SOLUTION", work=work + MODEL_WORK)
        work += work_of(answer, model, WHOLE_WORK)
        if answer.values is None or fits is None or turn == REFUSED or fits(choices.decode(answer.values)):
            break
        _refuse(choices, answer.values)
    return _exact(problem, choices, answer, work)


def _refuse(choices: Choices, values: Sequence[float]) -> None:
    """At least one choice is to be another."""
    made = {variable.id: variable for variables in choices.parts.values() for variable in variables}
    others = [1 - variable if values[variable.id] > 0.5 else variable for variable in made.values()]
    choices.model.add_linear_constraint(fast_sum(others) >= 1)


def _exact(problem: Problem, choices: Choices, answer: Answer, work: int) -> Exact:
    if answer.status == "INFEASIBLE":
        return Exact(answer.status, bound_s=problem.horizon_s, work=work)
    bound_s = max(0.0, answer.bound) * problem.horizon_s
    if answer.values is None:
        return Exact(answer.status, bound_s=bound_s, work=work)
    step_s = answer.objective * problem.horizon_s
    return Exact(answer.status, choices.decode(answer.values), step_s, min(bound_s, step_s), work)
