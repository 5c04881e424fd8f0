"""Boundaries straight between GPU memory and NVMe, where the machine can do that and the plan gains by it.

The planner decides as if all of them passed through the host. What it found is then priced both ways: the direct one
leaves the copies to and from the host out, and their buffers, but what is written is held on the GPU until it is on the
disk. The links are priced each on its own, as everywhere, although on a GPU both ways share its lanes.
"""

from __future__ import annotations

from ...jobs.policy import Policy
from ..baselines import shortages
from ..costs import lowered
from ..simulator import step_seconds
from .search import Question


def with_direct_nvme(question: Question, policy: Policy) -> Policy:
    """The policy with its boundaries on NVMe going there directly, if it fits and takes no longer; else as it is."""
    if not question.profile.gpudirect or "nvme" not in policy.homes:
        return policy
    direct = policy.model_copy(update={"direct_nvme": True})
    if shortages(direct, question.facts, question.budgets):
        return policy
    return direct if seconds(question, direct) <= seconds(question, policy) else policy


def seconds(question: Question, policy: Policy) -> float:
    """The step time of a policy."""
    return step_seconds(lowered(policy, question.facts), question.facts, question.profile)
