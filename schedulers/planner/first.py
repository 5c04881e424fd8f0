"""The first policy of a search, found without the full problem: a fixed rule, the paper's plan, or whatever fits."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Final

from ...jobs.errors import DoesNotFit
from ...jobs.policy import Policy
from ...jobs.policy.artifact import Home
from ..baselines import every_kth, keep_all, megatrain, shortages
from ..costs import lowered
from ..simulator import step_seconds
from .parking import ROUNDING, park, quickest_parking
from .search import NoScheduleError, OutOfTimeError, Question, find
from .solver import SolverFailed

PAPER_LAYERS: Final = 600
"""Layers, all in all, of the schedules that are solved and checked for the paper's plan, which is a candidate too."""
PAPER_SECONDS: Final = 6.0
"""Time for that: three times as much as it takes where nobody else computes."""
BETTER: Final = 1e-9
"""Share of the step time by which a policy must be faster to be taken."""


class Fastest:
    """The fastest policy that was offered and fits."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.policy: Policy | None = None
        self.step_s = float("inf")
        self.out_of_time = False
        """Whether the clock ended something, so that more could have been offered."""

    @property
    def best(self) -> Policy:
        """The policy, once there is one."""
        assert self.policy is not None  # a rule that fits comes first
        return self.policy

    def offer(self, policy: Policy) -> dict[str, int] | None:
        """Take a policy if it is faster than the best and fits; what it is short of if only memory is in its way."""
        question, policy = self.question, self.question.own(policy)
        program = lowered(policy, question.facts)
        step_s = step_seconds(program, question.facts, question.profile)
        if step_s >= self.step_s * (1 - BETTER):
            return None
        short = {
            s["resource"]: s["shortfall_bytes"] for s in shortages(policy, question.facts, question.budgets, program)
        }
        if not short:
            self.step_s, self.policy = step_s, policy
        return short

    def offer_paper(self) -> None:
        """Offer the paper's plan, if one is found."""
        asked = paper_question(self.question)
        with suppress(NoScheduleError, OutOfTimeError, SolverFailed):
            self.offer(find(asked).policy)
        self.out_of_time = asked.seconds_left() <= 0


def first_best(question: Question) -> Policy:
    """The fastest fixed rule that fits, or the paper's plan; where none does, a plan with optimizer state on NVMe, or
    one with copies out one by one. Raises NoScheduleError or OutOfTimeError if nothing fits or was found."""
    fastest = Fastest(question)
    offer_first(fastest)
    return fastest.best


def offer_first(fastest: Fastest) -> None:
    """Offer the policies among which `first_best` chooses, and raise as it does."""
    question, facts = fastest.question, fastest.question.facts
    fastest.offer(keep_all(facts, accumulation=question.accumulation))
    fastest.offer(megatrain(facts, accumulation=question.accumulation))
    rule = _least_recompute(question)
    if rule is not None:  # else the time goes to finding anything that fits
        fastest.offer(rule)
        fastest.offer_paper()
    for interval in range(1, question.longest_block + 1) if question.budgets.nvme_bytes else ():
        if fastest.policy is not None:
            break
        for policy in _parked(question, interval):
            fastest.offer(policy)
    if fastest.policy is None:
        fastest.offer(find(replace(question, staging_slots=1)).policy)


def _least_recompute(question: Question) -> Policy | None:
    """The rule with the shortest blocks that fits: longer ones recompute more."""
    for interval in range(1, question.longest_block + 1):
        with suppress(DoesNotFit):
            return every_kth(
                question.facts,
                question.profile,
                question.budgets,
                interval=interval,
                accumulation=question.accumulation,
                optimizer=question.optimizer,
            )
    return None


def _parked(question: Question, interval: int) -> Iterator[Policy]:
    """Every ``interval``-th boundary in one tier, and on NVMe the optimizer state that the host has no room for."""
    facts, layers = question.facts, len(question.facts.layers)
    tiers: tuple[Home, ...] = ("gpu", "host", "nvme")
    for tier in tiers:
        homes: list[Home] = ["recompute" if i % interval else tier for i in range(layers)]
        made = question.own(Policy.from_homes(facts, [*homes, "gpu"], accumulation=question.accumulation))
        short = {s["resource"]: s["shortfall_bytes"] for s in shortages(made, facts, question.budgets)}
        missing = math.ceil(short.get("host_memory", 0) * (1 + 2 * ROUNDING))
        parking = quickest_parking(made, facts, question.profile, missing)
        if parking is not None:
            yield park(made, facts, parking)


def paper_question(question: Question) -> Question:
    """The question as the paper's planner is asked it for a candidate: with so many turns, where a clock would decide
    differently from run to run."""
    turns = max(3, PAPER_LAYERS // len(question.facts.layers))
    deadline = min(question.deadline, time.monotonic() + PAPER_SECONDS)
    return replace(question, deadline=deadline, turns=iter(range(turns)))


def paper_plan(question: Question) -> Policy:
    """The paper's plan for the question. Raises NoScheduleError or OutOfTimeError."""
    return find(paper_question(question)).policy
