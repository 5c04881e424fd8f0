"""The full planning problem, solved for one shape: `choices` and `timing` put together."""

from __future__ import annotations

from dataclasses import dataclass

from ortools.math_opt.python import mathopt

from ...jobs.policy import Policy
from .choices import Choices
from .problem import FEW_LAYERS, Problem
from .solver import MODEL_WORK, WHOLE_WORK, SolverFailed, Status, run_solver, work_of
from .timing import Timing


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
) -> Exact:
    """The fastest policy of the problem's shape, to within ``gap``; or the first that takes no more than ``enough_s``.

    ``nodes`` limits the solver's search tree, ``seconds`` all of it; ``quick`` is as in `run_solver`.
    """
    model = mathopt.Model(name="lazytrain-full")
    choices = Choices(model, problem)
    timing = Timing(choices)
    model.minimize(timing.step)
    try:
        enough, twice = enough_s / problem.horizon_s, len(problem.facts.layers) <= FEW_LAYERS
        answer = run_solver(model, backend, seconds, gap, nodes, enough, quick=quick, twice=twice)
    except SolverFailed:
        return Exact("NO_SOLUTION", work=MODEL_WORK)
    work = work_of(answer, model, WHOLE_WORK)
    if answer.status == "INFEASIBLE":
        return Exact(answer.status, bound_s=problem.horizon_s, work=work)
    bound_s = max(0.0, answer.bound) * problem.horizon_s
    if answer.values is None:
        return Exact(answer.status, bound_s=bound_s, work=work)
    step_s = answer.objective * problem.horizon_s
    return Exact(answer.status, choices.decode(answer.values), step_s, min(bound_s, step_s), work)
