"""Why nothing fits, and how much more of what would help. Every figure was tried: with so many bytes a plan exists."""

from __future__ import annotations

from typing import Any, Final

from ...jobs.policy import Policy, lower
from ...jobs.units import format_bytes, format_needed
from ..baselines import shortage
from ..costs import staging_bytes
from .paper import Tier, least_bytes
from .search import Attempt, NoScheduleError, OutOfTimeError, Question, find

RESOURCES: Final[dict[Tier, str]] = {"gpu": "gpu_memory", "host": "host_memory", "nvme": "nvme"}
ATTEMPTS: Final = 12


def explain(question: Question) -> list[dict[str, Any]]:
    """The resources that are short: those that no other can make up for, all needed; or else each that alone would do.

    Raises OutOfTimeError if the deadline passes before one is found.
    """
    plenty = _plenty(question)
    relaxations: dict[Tier, Question] = {
        "gpu": question.with_budgets(host=plenty),
        "host": question.with_budgets(gpu=plenty),
    }
    required = [
        (tier, need)
        for tier, relaxed in relaxations.items()
        if (need := _least_budget(relaxed, tier)) is not None and need > question.budget(tier)
    ]
    if required:
        return [_reason(question, tier, need, "") for tier, need in required]
    enough = [(tier, need) for tier in RESOURCES if (need := _least_budget(question, tier)) is not None]
    if not enough:
        raise OutOfTimeError
    others = " (any one of the changes listed is enough)" if len(enough) > 1 else ""
    return [_reason(question, tier, need, others) for tier, need in enough]


def _least_budget(question: Question, tier: Tier) -> int | None:
    """Bytes of ``tier`` with which a plan exists when the other budgets stay; None if none is found."""
    for _ in range(ATTEMPTS):
        try:
            find(question)
        except NoScheduleError as error:
            missing = [_missing(attempt, tier) for attempt in error.attempts]
            more = min((bytes_ for bytes_ in missing if bytes_ is not None), default=None)
            if more is None:
                return None
            question = question.with_budgets(**{tier: question.budget(tier) + more})
        except OutOfTimeError:
            return None
        else:
            return question.budget(tier)
    return None


def _missing(attempt: Attempt, tier: Tier) -> int | None:
    """By how much the tier's budget must grow at least; None if no growth of it helps."""
    budgets = attempt.instance.budgets.by_tier()
    if any(budget < 0 for other, budget in budgets.items() if other != tier):
        return None
    if tier == "gpu" and attempt.overshoot is not None:
        return attempt.overshoot
    least = least_bytes(attempt.instance, tier)
    return None if least is None else max(1, least - budgets[tier])


def _plenty(question: Question) -> int:
    """More bytes than any plan for the question could use in a tier."""
    facts = question.facts
    everything = Policy.from_homes(facts, ["gpu"] * len(facts.boundary_bytes), accumulation=question.accumulation)
    host = question.state_bytes + staging_bytes(facts, "nvme", question.accumulation)
    return max(host, lower(everything, facts).peak_bytes("gpu")) + 2 * sum(facts.boundary_bytes)


def _reason(question: Question, tier: Tier, needed: int, others: str) -> dict[str, Any]:
    available = question.budget(tier)
    more = format_needed(needed - available)
    hints = {
        "gpu": f"give the plan {more} more GPU memory, or use a smaller batch or shorter rows",
        "host": f"give the job {more} more host memory; the model's state alone takes "
        f"{format_bytes(question.state_bytes)}",
        "nvme": f"give boundaries {more} more room on NVMe",
    }
    return shortage(RESOURCES[tier], needed, available, hints[tier] + others)
