"""The solvers behind the planners: which there are, how long they work, what their answers prove."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Sequence
from ctypes import CDLL, c_void_p
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import attrgetter
from typing import Any, Final, Literal

from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers.highs_pb2 import HighsOptionsProto

from ...jobs.errors import InputError, LazytrainError
from .linear import Model

Status = Literal["OPTIMAL", "FEASIBLE", "INFEASIBLE", "NO_SOLUTION"]
BACKENDS: Final = {"highs": mathopt.SolverType.HIGHS, "gscip": mathopt.SolverType.GSCIP}
GAP: Final = 1e-9
MODEL_WORK: Final = 300
"""What making and presolving a model costs, in iterations on a thousand rows."""
WHOLE_WORK: Final = 1.5
"""How much longer an iteration takes where every choice is whole: with it go cuts, trial branching and heuristics."""
PARTS_WORK: Final = 0.25
"""How long one takes where none is, and there is nothing to branch on."""
HEURISTICS: Final = ("rins", "rens", "feasibility_jump", "root_reduced_cost")
log = logging.getLogger(__name__)


class SolverFailed(LazytrainError):
    """A solver gave up on a model, whatever it was asked; nothing is known of it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of a model that was to be minimised, in the model's units."""

    status: Status
    bound: float
    """No solution is below; infinite where there is none."""
    objective: float = math.inf
    """That of ``values``."""
    values: Sequence[float] | None = None
    """The best solution found, by the variables' numbers."""
    iterations: int = 0
    """Of the simplex method."""
    seconds: float = 0.0


def run_solver(
    model: Model,
    backend: str,
    seconds: float,
    gap: float,
    nodes: int | None = None,
    enough: float = 0.0,
    *,
    quick: bool = False,
    only_bound: bool = False,
    twice: bool = False,
) -> Answer:
    """Minimise a model, until ``seconds`` or ``nodes`` of the search tree are spent.

    HiGHS also stops at a solution whose objective is not above ``enough``, and does not start over; with ``quick`` it
    sees more nodes in the same time, and with ``only_bound`` it does not look for solutions beside its search. On rare
    problems it fails when asked so, and then is not. It does not presolve, for large models are no slower without. Of a
    small model in a thousand it takes the optimum away, some with presolve and others without: ``twice`` asks both
    ways, the second in what the first left of ``seconds``, and takes the better solution of the two and the bound of
    the one that proves less.
    Raises InputError for an unknown backend, SolverFailed where that fails as well.
    """
    if backend not in BACKENDS:
        raise InputError(f"no solver backend is called {backend!r}", hint=f"choose one of {', '.join(BACKENDS)}")
    deadline = time.monotonic() + seconds
    parameters = mathopt.SolveParameters(
        relative_gap_tolerance=gap,
        absolute_gap_tolerance=GAP,
        node_limit=nodes,
        presolve=mathopt.Emphasis.OFF if backend == "highs" else None,
    )
    ways = [parameters, replace(parameters, presolve=None)] if twice and backend == "highs" else [parameters]
    special = backend == "highs" and bool(enough or quick or only_bound)
    options = _highs_options(enough, quick=quick, only_bound=only_bound) if special else None
    made = model.to_mathopt()
    return _together([_solve(made, backend, way, options, deadline) for way in ways])


def _together(answers: Sequence[Answer]) -> Answer:
    """One answer: the best solution, and no more proven than each of them proves."""
    least, best = min(answers, key=attrgetter("bound")), min(answers, key=attrgetter("objective"))
    return Answer(
        "FEASIBLE" if least.values is None and best.values is not None else least.status,
        least.bound,
        best.objective,
        best.values,
        sum(answer.iterations for answer in answers),
        sum(answer.seconds for answer in answers),
    )


def _solve(model: Any, backend: str, parameters: mathopt.SolveParameters, options: Any, deadline: float) -> Answer:
    """Solve with HiGHS's options if there are any, and without where that fails."""
    for wanted in [replace(parameters, highs=options), parameters] if options else [parameters]:
        left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
        try:
            with _ASIDE:
                result = mathopt.solve(model, BACKENDS[backend], params=replace(wanted, time_limit=left))
                return _answer(result, model)
        except (AttributeError, RuntimeError, ValueError) as error:  # MathOpt lets some solver errors out as these
            log.info("the solver %s failed: %s", backend, error)
            failure = error
    raise SolverFailed(
        f"the solver {backend} failed: {failure}",
        hint=f"try another backend: {', '.join(b for b in BACKENDS if b != backend)}",
    )


def _highs_options(enough: float, *, quick: bool, only_bound: bool) -> Any:
    """Quick is: without the heuristic that took most of the time, with little trial branching, cuts soon forgotten."""
    options = HighsOptionsProto(bool_options={"mip_allow_restart": False})
    if enough:
        options.double_options["objective_target"] = enough
    for name in HEURISTICS if only_bound else HEURISTICS[:1] if quick else ():
        options.bool_options[f"mip_heuristic_run_{name}"] = False
    if quick:
        options.int_options["mip_pscost_minreliable"] = 1
        options.int_options["mip_lp_age_limit"] = 5
    return options


def _answer(result: Any, model: Any) -> Answer:
    """A MathOpt result. Raises RuntimeError where the solver stopped for a reason of its own."""
    status, iterations = _status(result), result.solve_stats.simplex_iterations
    bound = math.inf if status == "INFEASIBLE" else float(result.dual_bound())
    spent = result.solve_time().total_seconds()
    if not result.has_primal_feasible_solution():
        return Answer(status, bound, iterations=iterations, seconds=spent)
    values = result.variable_values(model.variables())
    return Answer(status, bound, float(result.objective_value()), values, iterations, spent)


def _status(result: Any) -> Status:
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
    raise RuntimeError(f"it stopped with {reason.name}: {result.termination.detail}")


def work_of(answer: Answer, model: Model, each: float = 1) -> int:
    """How much the solver did, the same in every run: iterations of the simplex method, which take longer with rows.

    One iteration takes ``each`` times as long as where some choices are whole.
    """
    size = (1000 + len(model.constraints)) / 2000
    return MODEL_WORK + int(answer.iterations * size * each)


class _Aside:
    """HiGHS prints lines of its own with C's printf, whatever its options say: they go to stderr while it works.

    On stdout they would stand among a command's JSON. Python writes to the descriptors itself: what its threads print
    meanwhile is not touched, and others may be solving too.
    """

    def __init__(self) -> None:
        self._lock, self._solving = threading.Lock(), 0
        names = ("__stdoutp", "__stderrp") if sys.platform == "darwin" else ("stdout", "stderr")
        self._stdout, stderr = (c_void_p.in_dll(CDLL(None), name) for name in names)
        self._heard, self._aside = self._stdout.value, stderr.value

    def __enter__(self) -> None:
        self._count(1)

    def __exit__(self, *_: object) -> None:
        self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self._solving += more
            self._stdout.value = self._aside if self._solving else self._heard


_ASIDE: Final = _Aside()
