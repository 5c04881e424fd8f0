"""From a model and a machine to a policy that is known to fit, or to the reasons for which none does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from ...jobs.errors import DoesNotFit, InputError, LazytrainError
from ...jobs.model_facts import ModelFacts
from ...jobs.policy import Certificate, Policy, Predicted
from ..baselines import every_kth, megatrain, shortages
from ..hardware import Budgets, HardwareProfile
from ..simulator import predict
from .answer import Plan, Reason, Solver
from .instance import LONGEST_BLOCK
from .paper import BACKENDS
from .reasons import explain
from .search import NoScheduleError, OutOfTimeError, Question, find

EXPLAIN_SECONDS: Final = 10.0
"""Time for finding out what would help once it is proven that nothing fits."""


def plan(
    facts: ModelFacts,
    profile: HardwareProfile,
    *,
    planner: str = "paper",
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    nvme: str | int | None = None,
    solve_seconds: float = 20.0,
    backend: str = "highs",
    accumulation: int = 1,
) -> Plan:
    """Decide the policy for ``facts`` on ``profile`` and say what it will take.

    ``planner`` is ``paper`` (the MILP of the LazyTrain paper), ``every_layer`` or ``megatrain``. Memory is text such as
    ``"70GB"`` or bytes and replaces what the profile offers. Every policy handed out was lowered and its memory
    checked. When time runs out the best plan found is returned with its gap, or else a rule's, flagged ``FALLBACK``.
    Raises InputError for an unknown planner, backend or amount of memory, LazytrainError if time ran out
    and no rule fits.
    """
    _choice("planner", planner, tuple(_PLANNERS))
    _choice("backend", backend, tuple(BACKENDS))
    if accumulation < 1:
        raise InputError(f"a step has at least 1 micro-batch, not {accumulation}")
    budgets = Budgets.of(profile, gpu_memory=gpu_memory, host_memory=host_memory, nvme=nvme)
    question = Question(facts, profile, budgets, accumulation, backend, time.monotonic() + solve_seconds)
    try:
        policy, solver = _PLANNERS[planner](question)
    except DoesNotFit as error:
        return Plan(feasible=False, reasons=tuple(Reason(**reason) for reason in error.reasons))
    return _complete(question, policy, solver)


def _paper(question: Question) -> tuple[Policy, Solver]:
    try:
        found = find(question)
    except NoScheduleError as error:
        raise DoesNotFit("no schedule fits", reasons=_explain(question)) from error
    except OutOfTimeError:
        return _fallback(question)
    solution = found.solution
    return found.policy, Solver(
        planner="paper",
        backend=question.backend.upper(),
        status=solution.status,
        objective_s=solution.objective_s,
        bound_s=solution.bound_s,
        gap=solution.gap,
        seconds=found.seconds,
    )


def _fallback(question: Question) -> tuple[Policy, Solver]:
    """The rule that recomputes least, if one fits: what there is when the solver ran out of time with nothing."""
    for interval in range(1, LONGEST_BLOCK + 1):
        try:
            policy = _every_kth(question, interval)
        except DoesNotFit:
            continue
        return policy, Solver(planner="paper", backend=question.backend.upper(), status="FALLBACK")
    raise LazytrainError(
        "the solver found no plan in the time it had, and no fixed rule fits either",
        hint="give it more time (plan.solve_seconds), or more memory",
    )


def _every_layer(question: Question) -> tuple[Policy, Solver]:
    return _every_kth(question, 1), Solver(planner="every_layer", status="RULE")


def _megatrain(question: Question) -> tuple[Policy, Solver]:
    policy = megatrain(question.facts, accumulation=question.accumulation)
    short = shortages(policy, question.facts, question.budgets)
    if short:
        raise DoesNotFit("MegaTrain's rule does not fit", reasons=tuple(short), hint=short[0]["hint"])
    return policy, Solver(planner="megatrain", status="RULE")


_PLANNERS: Final[dict[str, Callable[[Question], tuple[Policy, Solver]]]] = {
    "paper": _paper,
    "every_layer": _every_layer,
    "megatrain": _megatrain,
}


def _every_kth(question: Question, interval: int) -> Policy:
    return every_kth(
        question.facts, question.profile, question.budgets, interval=interval, accumulation=question.accumulation
    )


def _explain(question: Question) -> tuple[dict[str, Any], ...]:
    try:
        return tuple(explain(replace(question, deadline=time.monotonic() + EXPLAIN_SECONDS)))
    except OutOfTimeError:
        return _rule_reasons(question)


def _rule_reasons(question: Question) -> tuple[dict[str, Any], ...]:
    """What the rule with the fewest boundaries is short of."""
    try:
        _every_kth(question, LONGEST_BLOCK)
    except DoesNotFit as error:
        return error.reasons
    return ()


def _complete(question: Question, policy: Policy, solver: Solver) -> Plan:
    """Add what the simulator expects of the policy, and what the rules that fit would take."""
    facts, profile = question.facts, question.profile
    predicted = predict(policy, facts, profile)
    certificate = Certificate(
        planner=solver.planner,
        backend=solver.backend,
        status=solver.status,
        objective_s=solver.objective_s,
        bound_s=solver.bound_s,
        gap=solver.gap,
    )
    complete = {"hardware_digest": profile.digest, "predicted": predicted, "certificate": certificate}
    return Plan(
        feasible=True,
        policy=policy.model_copy(update=complete),
        predicted=predicted,
        solver=solver,
        baselines=_baselines(question),
    )


def _baselines(question: Question) -> dict[str, Predicted]:
    predicted = {}
    for name in ("megatrain", "every_layer"):
        with suppress(DoesNotFit):
            policy, _ = _PLANNERS[name](question)
            predicted[name] = predict(policy, question.facts, question.profile)
    return predicted


def _choice(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise InputError(f"no {what} is called {name!r}", hint=f"choose one of {', '.join(known)}")
