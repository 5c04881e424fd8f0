"""Who had the GPUs of late, for fair share: derived from what happened to the jobs, so that no restart forgets it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ...jobs.lifecycle import JobState
from ..store import Change
from .desk import ACTIVE, Desk

_EVERY_S = 60.0
_HALF_LIVES = 5
"""What is longer ago counts for less than a thirtieth, and is left out."""
_HELD_BEFORE = {JobState.RUNNING, JobState.PAUSING, JobState.RECOVERING, JobState.SUCCEEDED}
"""States that a job only comes to while it holds a GPU."""


def used_gpu_s(desk: Desk) -> Mapping[str, float]:
    """GPU seconds of each user; a second counts half after every half-life. At most a minute old."""
    now = desk.clock()
    if now - desk.notes.used_at >= _EVERY_S:
        since = now - _HALF_LIVES * desk.config.usage_half_life_s
        holding = {job.id: job.user for job in desk.store.jobs.list(states=ACTIVE) if job.gpu}
        spans = held_spans(desk.store.jobs.changes(since), holding, since, now)
        desk.notes.used, desk.notes.used_at = faded(spans, now, desk.config.usage_half_life_s), now
    return desk.notes.used


def held_spans(
    changes: Iterable[Change], holding: Mapping[str, str], since: float, now: float
) -> list[tuple[str, float, float]]:
    """User, begin and end of every time that a job held a GPU after ``since``.

    ``changes`` of state are in the order in which they happened; ``holding`` are the jobs that hold one now, with
    their users.
    """
    begun: dict[str, float] = {}
    known: set[str] = set()
    spans = []
    for change in changes:
        if change.job not in known and change.state in _HELD_BEFORE:
            begun[change.job] = since
        known.add(change.job)
        if change.state in ACTIVE:
            if change.state is JobState.STARTING or change.job in begun:
                begun.setdefault(change.job, change.time)
        elif change.job in begun:
            spans.append((change.user, begun.pop(change.job), change.time))
    return spans + [(user, begun.get(job, since if job not in known else now), now) for job, user in holding.items()]


def faded(spans: Sequence[tuple[str, float, float]], now: float, half_life_s: float) -> dict[str, float]:
    """By user, the integral over all spans of 2^(-age / half-life), in seconds."""
    found: dict[str, float] = defaultdict(float)
    for user, begin, end in spans:
        # What was written by a clock that was ahead has not happened later than now.
        weights = (2.0 ** (-max(0.0, now - moment) / half_life_s) for moment in (end, begin))
        found[user] += half_life_s / math.log(2.0) * (next(weights) - next(weights))
    return dict(found)
