"""What would make an impossible question possible. Every change is planned with before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from ...jobs.model_facts import ModelFacts
from ...jobs.policy import Policy
from ...jobs.units import format_bytes, format_needed, parse_bytes
from ..simulator import predict
from .answer import Change, Reason
from .first import first_best
from .parking import NOTHING, Parking
from .search import NoScheduleError, OutOfTimeError, Question

TIERS = {"gpu_memory": "gpu", "host_memory": "host", "nvme": "nvme"}
MOST_LAYER_RUNS = 4096
"""Layers times micro-batches of a step: to write down a longer one takes longer than anybody waits for advice."""
Words = Literal["gpu_memory", "host_memory", "nvme", "memory", "batch", "master"]


def changes(
    question: Question, reasons: Sequence[Reason], facts_at: Callable[[int], ModelFacts] | None
) -> tuple[Change, ...]:
    """The changes that were found to help: a smaller batch, a shorter master, then more of each memory."""
    found = [
        *_smaller_batch(question, facts_at),
        *_shorter_master(question),
        *_state_on_nvme(question),
        *_more_memory(question, reasons),
    ]
    return tuple(found)


def _smaller_batch(question: Question, facts_at: Callable[[int], ModelFacts] | None) -> Iterator[Change]:
    """The first of half, a quarter, ... of the batch that fits, with as many more micro-batches a step."""
    if facts_at is None or question.state_bytes > question.budgets.host_bytes:
        return
    batch, number = question.facts.micro_batch, question.accumulation
    most = MOST_LAYER_RUNS // len(question.facts.layers)
    while batch % 2 == 0 and number * 2 <= most and question.seconds_left() > 0:
        batch, number = batch // 2, number * 2
        smaller = replace(question, facts=facts_at(batch), accumulation=number, solved={})
        words = f"micro-batches of {batch} rows instead of {question.facts.micro_batch}, {number} of them a step"
        change = _verified(smaller, "batch", words)
        if change:
            yield change
            return


def _shorter_master(question: Question) -> Iterator[Change]:
    """Without the low halves of the master, with stochastic rounding instead."""
    shorter = replace(question, optimizer=question.optimizer.model_copy(update={"master": "bf16_stochastic"}))
    spared = question.state_bytes - shorter.state_bytes
    if spared:
        words = (
            f"a bfloat16 master with stochastic rounding (optimizer.master: bf16_stochastic): it needs "
            f"{format_bytes(spared)} less host memory than the exact one, and rounds every update"
        )
        change = _verified(shorter, "master", words)
        if change:
            yield change


def _state_on_nvme(question: Question) -> Iterator[Change]:
    """Optimizer state and gradients of as many layers as it takes."""
    facts, size = question.facts, question.state_bytes
    if question.budgets.nvme_bytes >= size:
        return
    policy = _any_plan(question.with_budgets(nvme=2 * size))
    parking = Parking.of(policy, facts) if policy is not None else NOTHING
    if policy is None or parking == NOTHING:
        return
    predicted = predict(policy, facts, question.profile)
    words = (
        f"{format_needed(predicted.nvme_bytes)} on NVMe, for the optimizer state of {parking.states} and the gradients "
        f"of {parking.gradients} of {len(policy.layers)} layers"
    )
    yield Change(what="nvme", words=words, step_s=predicted.step_s, tokens_per_s=predicted.tokens_per_s)


def _more_memory(question: Question, reasons: Sequence[Reason]) -> Iterator[Change]:
    """More of each resource that alone is enough; or else of all that are short together."""
    single = [change for reason in reasons for change in _with_more(question, [reason], _named(reason.resource))]
    yield from single or _with_more(question, reasons, "memory")


def _with_more(question: Question, reasons: Sequence[Reason], what: Words) -> Iterator[Change]:
    in_all = {reason: format_needed(reason.needed_bytes) for reason in reasons}
    budgets = {TIERS[reason.resource]: parse_bytes(size) for reason, size in in_all.items()}  # what people will give
    words = " and ".join(
        f"{format_needed(reason.shortfall_bytes)} more {reason.resource.replace('_', ' ')} ({size} in all)"
        for reason, size in in_all.items()
    )
    change = _verified(question.with_budgets(**budgets), what, words) if reasons else None
    if change:
        yield change


def _named(resource: str) -> Words:
    named: dict[str, Words] = {"gpu_memory": "gpu_memory", "host_memory": "host_memory", "nvme": "nvme"}
    return named[resource]


def _verified(question: Question, what: Words, words: str) -> Change | None:
    """The change, if a plan with it exists and is found in time."""
    policy = _any_plan(question)
    if policy is None:
        return None
    predicted = predict(policy, question.facts, question.profile)
    return Change(what=what, words=words, step_s=predicted.step_s, tokens_per_s=predicted.tokens_per_s)


def _any_plan(question: Question) -> Policy | None:
    try:
        return first_best(question)
    except (NoScheduleError, OutOfTimeError):
        return None
