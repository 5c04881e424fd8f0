"""From a model and a machine to a policy that is known to fit, or to the reasons for which none does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from ...jobs.errors import DoesNotFit, InputError, OutOfTime
from ...jobs.model_facts import ModelFacts
from ...jobs.optimizer_bytes import DEFAULT_OPTIMIZER, OptimizerOptions
from ...jobs.policy import Certificate, Policy, Predicted
from ..baselines import every_kth, keep_all, megatrain, shortages
from ..costs import lowered
from ..hardware import Budgets, HardwareProfile
from ..simulator import predict
from .answer import Plan, Reason, Solver
from .changes import changes
from .direct import seconds, with_direct_nvme
from .first import PAPER_SECONDS, first_best, paper_plan
from .full import search_full
from .instance import LONGEST_BLOCK
from .reasons import explain
from .search import NoScheduleError, OutOfTimeError, Question, find
from .solver import BACKENDS, SolverFailed

RULES: Final = ("megatrain", "every_layer", "keep_all")
PROVEN_GAP: Final = 0.01
EXPLAIN_SECONDS: Final = 10.0
"""Time for finding out what would help once it is proven that nothing fits."""


def plan(
    facts: ModelFacts,
    profile: HardwareProfile,
    *,
    planner: str = "full",
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    nvme: str | int | None = None,
    solve_seconds: float = 20.0,
    backend: str = "highs",
    accumulation: int = 1,
    optimizer: OptimizerOptions = DEFAULT_OPTIMIZER,
    facts_at: Callable[[int], ModelFacts] | None = None,
    baselines: bool = True,
) -> Plan:
    """Decide the policy for ``facts`` on ``profile`` and say what it will take.

    ``planner`` is ``full`` (everything the executor can do, timed as the simulator does), ``paper`` (the MILP of the
    LazyTrain paper), ``every_layer``, ``megatrain`` or ``keep_all``. Memory is text such as
    ``"70GB"`` or bytes and replaces what the profile offers. Every policy handed out was lowered and its memory
    checked. ``optimizer`` says how much host memory a parameter takes. When time runs out the best plan found is
    returned with its gap, or else a rule's, flagged ``FALLBACK``.
    Where nothing fits the answer says why, and which changes would help; with ``facts_at``, the model's facts at any
    micro-batch, a smaller one is among them. ``baselines`` says whether to look at the rules too (see `beside_rules`).
    Raises InputError for an unknown planner, backend or amount of memory,
    OutOfTime if time ran out and no rule fits.
    """
    _choice("planner", planner, tuple(_PLANNERS))
    _choice("backend", backend, tuple(BACKENDS))
    if accumulation < 1:
        raise InputError(f"a step has at least 1 micro-batch, not {accumulation}")
    budgets = Budgets.of(profile, gpu_memory=gpu_memory, host_memory=host_memory, nvme=nvme)
    deadline = time.monotonic() + solve_seconds
    question = Question(facts, profile, budgets, accumulation, backend, deadline, optimizer=optimizer)
    try:
        policy, solver = _PLANNERS[planner](question)
    except DoesNotFit as error:
        reasons = tuple(Reason(**reason) for reason in error.reasons)
        later = replace(question, deadline=time.monotonic() + EXPLAIN_SECONDS)
        return Plan(feasible=False, reasons=reasons, changes=changes(later, reasons, facts_at))
    answer = _complete(question, policy, solver)
    return _beside_rules(answer, question) if baselines else answer


def beside_rules(
    answer: Plan,
    facts: ModelFacts,
    profile: HardwareProfile,
    *,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    nvme: str | int | None = None,
    backend: str = "highs",
    accumulation: int = 1,
    optimizer: OptimizerOptions = DEFAULT_OPTIMIZER,
    **_: Any,
) -> Plan:
    """The answer of `plan` to these arguments, with what the fixed rules that fit would take."""
    budgets = Budgets.of(profile, gpu_memory=gpu_memory, host_memory=host_memory, nvme=nvme)
    deadline = time.monotonic() + PAPER_SECONDS
    question = Question(facts, profile, budgets, accumulation, backend, deadline, optimizer=optimizer)
    return _beside_rules(answer, question)


def fits(
    facts: ModelFacts,
    profile: HardwareProfile,
    *,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    nvme: str | int | None = None,
    accumulation: int = 1,
    optimizer: OptimizerOptions = DEFAULT_OPTIMIZER,
    seconds: float = 5.0,
) -> bool:
    """Whether any policy is found that fits; much quicker than `plan`, which looks for the best one and for reasons."""
    budgets = Budgets.of(profile, gpu_memory=gpu_memory, host_memory=host_memory, nvme=nvme)
    deadline = time.monotonic() + seconds
    question = Question(facts, profile, budgets, accumulation, "highs", deadline, optimizer=optimizer)
    try:
        first_best(question)
    except (NoScheduleError, OutOfTimeError):
        return False
    return True


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
    raise OutOfTime(
        "the solver found no plan in the time it had, and no fixed rule fits either",
        hint="give it more time (plan.solve_seconds), or more memory",
    )


def _full(question: Question) -> tuple[Policy, Solver]:
    begun, computed = time.monotonic(), time.process_time()
    try:
        search = search_full(question)
    except NoScheduleError as error:
        raise DoesNotFit("no schedule fits", reasons=_explain(replace(question, staging_slots=1))) from error
    except OutOfTimeError:
        policy, solver = _fallback(question)
        return policy, solver.model_copy(update={"planner": "full"})
    policy, objective_s, bound_s = with_direct_nvme(question, search.best), search.step_s, search.bound_s
    if policy.direct_nvme:  # the bound is that of policies by way of the host
        objective_s, bound_s = seconds(question, policy), None
    gap = None if bound_s is None else 1 - bound_s / objective_s
    return policy, Solver(
        planner="full",
        backend=question.backend.upper(),
        status="OPTIMAL" if gap is not None and gap <= PROVEN_GAP else "FEASIBLE",
        objective_s=_round(objective_s),
        bound_s=None if bound_s is None else _round(bound_s),
        gap=None if gap is None else _round(gap),
        out_of_time=search.out_of_time,
        seconds=time.monotonic() - begun,
        cpu_seconds=time.process_time() - computed,
    )


def _round(value: float) -> float:
    """Nine significant digits: what a policy file records does not depend on the last bits of a sum."""
    return float(f"{value:.9g}")


def _every_layer(question: Question) -> tuple[Policy, Solver]:
    return _every_kth(question, 1), Solver(planner="every_layer", status="RULE")


def _megatrain(question: Question) -> tuple[Policy, Solver]:
    policy = question.own(megatrain(question.facts, accumulation=question.accumulation))
    return _fitting(question, policy, "megatrain"), Solver(planner="megatrain", status="RULE")


def _keep_all(question: Question) -> tuple[Policy, Solver]:
    policy = question.own(keep_all(question.facts, accumulation=question.accumulation))
    return _fitting(question, policy, "keep_all"), Solver(planner="keep_all", status="RULE")


def _fitting(question: Question, policy: Policy, name: str) -> Policy:
    short = shortages(policy, question.facts, question.budgets)
    if short:
        raise DoesNotFit(f"the rule {name} does not fit", reasons=tuple(short), hint=short[0]["hint"])
    return policy


_PLANNERS: Final[dict[str, Callable[[Question], tuple[Policy, Solver]]]] = {
    "full": _full,
    "paper": _paper,
    "every_layer": _every_layer,
    "megatrain": _megatrain,
    "keep_all": _keep_all,
}


def _every_kth(question: Question, interval: int) -> Policy:
    return every_kth(
        question.facts,
        question.profile,
        question.budgets,
        interval=interval,
        accumulation=question.accumulation,
        optimizer=question.optimizer,
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
    """Add what the simulator expects of the policy."""
    profile = question.profile
    predicted = _predict(question, policy)
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
        notes=question.facts.notes,
    )


def _beside_rules(answer: Plan, question: Question) -> Plan:
    paper = answer.solver is not None and answer.solver.planner == "full"
    return answer.model_copy(update={"baselines": _baselines(question, paper=paper)}) if answer.feasible else answer


def _baselines(question: Question, *, paper: bool) -> dict[str, Predicted]:
    """What the rules that fit would take, and the paper's plan."""
    predicted = {}
    for name in RULES:
        with suppress(DoesNotFit):
            policy, _ = _PLANNERS[name](question)
            predicted[name] = _predict(question, policy)
    if paper:
        with suppress(NoScheduleError, OutOfTimeError, SolverFailed):
            predicted["paper"] = _predict(question, paper_plan(question))
    return predicted


def _predict(question: Question, policy: Policy) -> Predicted:
    facts = question.facts
    return predict(policy, facts, question.profile, lowered(policy, facts))


def _choice(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise InputError(f"no {what} is called {name!r}", hint=f"choose one of {', '.join(known)}")
