"""The solvers behind the planners: which there are, how long they work, what their answers prove."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers.highs_pb2 import HighsOptionsProto

from ...jobs.errors import InputError, LazytrainError

Status = Literal["OPTIMAL", "FEASIBLE", "INFEASIBLE", "NO_SOLUTION"]
BACKENDS: Final = {"highs": mathopt.SolverType.HIGHS, "gscip": mathopt.SolverType.GSCIP}
GAP: Final = 1e-9
MODEL_WORK: Final = 300
"""What making and presolving a model costs, in iterations on a thousand rows."""
WHOLE_WORK: Final = 3
"""How much longer an iteration takes where every choice is whole: with it go cuts, trial branching and heuristics."""
STDOUT: Final = 1
_ALONE = threading.RLock()
log = logging.getLogger(__name__)


class SolverFailed(LazytrainError):
    """A solver gave up on a model, whatever it was asked; nothing is known of it."""


def run_solver(
    model: Any,
    backend: str,
    seconds: float,
    gap: float,
    nodes: int | None = None,
    enough: float = 0.0,
    *,
    quick: bool = False,
    twice: bool = False,
) -> Any:
    """Solve a MathOpt model, until ``seconds`` or ``nodes`` of the search tree are spent.

    HiGHS also stops at a solution whose objective is not above ``enough``, and does not start over; with ``quick`` it
    sees more nodes in the same time. On rare problems it fails when asked so, and then is not. It does not presolve,
    for large models are no slower without. Of a small model in a thousand it takes the optimum away, some with presolve
    and others without: ``twice`` asks both ways, and returns what proves less.
    Raises InputError for an unknown backend, SolverFailed where that fails as well.
    """
    if backend not in BACKENDS:
        raise InputError(f"no solver backend is called {backend!r}", hint=f"choose one of {', '.join(BACKENDS)}")
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=max(0.0, seconds)),
        relative_gap_tolerance=gap,
        absolute_gap_tolerance=GAP,
        node_limit=nodes,
        presolve=mathopt.Emphasis.OFF if backend == "highs" else None,
    )
    ways = [parameters, replace(parameters, presolve=None)] if twice and backend == "highs" else [parameters]
    options = _highs_options(enough, quick) if (enough or quick) and backend == "highs" else None
    return min((_solve(model, backend, way, options) for way in ways), key=_proven)


def _proven(result: Any) -> float:
    """The bound that a result proves."""
    return float("inf") if status_of(result) == "INFEASIBLE" else float(result.dual_bound())


def _solve(model: Any, backend: str, parameters: mathopt.SolveParameters, options: Any) -> Any:
    """Solve with HiGHS's options if there are any, and without where that fails."""
    for wanted in [replace(parameters, highs=options), parameters] if options else [parameters]:
        try:
            with _stdout_unheard():
                return mathopt.solve(model, BACKENDS[backend], params=wanted)
        except (AttributeError, RuntimeError, ValueError) as error:  # MathOpt lets some solver errors out as these
            log.info("the solver %s failed: %s", backend, error)
            failure = error
    raise SolverFailed(
        f"the solver {backend} failed: {failure}",
        hint=f"try another backend: {', '.join(b for b in BACKENDS if b != backend)}",
    )


def _highs_options(enough: float, quick: bool) -> Any:
    """Quick is: without the heuristic that took most of the time, with little trial branching, cuts soon forgotten."""
    options = HighsOptionsProto(bool_options={"mip_allow_restart": False})
    if enough:
        options.double_options["objective_target"] = enough
    if quick:
        options.bool_options["mip_heuristic_run_rins"] = False
        options.int_options["mip_pscost_minreliable"] = 1
        options.int_options["mip_lp_age_limit"] = 5
    return options


def status_of(result: Any) -> Status:
    """What a MathOpt result proves."""
    reason = result.termination.reason
    if reason == mathopt.TerminationReason.OPTIMAL:
        return "OPTIMAL"
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return "INFEASIBLE"
    if result.has_primal_feasible_solution():
        return "FEASIBLE"
    if reason == mathopt.TerminationReason.NO_SOLUTION_FOUND:
        return "NO_SOLUTION"
    raise LazytrainError(f"the solver stopped with {reason.name}: {result.termination.detail}")


def work_of(result: Any, model: Any, *, whole: bool) -> int:
    """How much the solver did, the same in every run: iterations of the simplex method, which take longer with rows."""
    size = (1000 + model.get_num_linear_constraints()) / 2000
    return MODEL_WORK + int(result.solve_stats.simplex_iterations * size * (WHOLE_WORK if whole else 1))


@contextmanager
def _stdout_unheard() -> Iterator[None]:
    """HiGHS prints a line of its own whenever it repairs a solution, which would stand among a command's JSON."""
    if sys.stdout is None:  # it was closed when the process began: there is nobody to hear
        yield
        return
    sys.stdout.flush()
    with _ALONE, Path(os.devnull).open("wb") as nowhere:
        heard = os.dup(STDOUT)
        os.dup2(nowhere.fileno(), STDOUT)
        try:
            yield
        finally:
            os.dup2(heard, STDOUT)
            os.close(heard)
