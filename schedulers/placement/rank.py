"""Who goes first: what a job's waiting weighs, and the order that follows."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from .question import Question, WaitingJob

TIGHT: Final = 8.0
"""Times that a job counts while its deadline can be met, but has less than its own run time to spare."""


def weights(question: Question, jobs: Iterable[WaitingJob], cost: Mapping[str, float]) -> dict[str, float]:
    """What a second of each job's waiting weighs: age x fair share x deadline.

    Age: 1, and 1 more for every ``ageing_s`` waited. Fair share (as in Slurm's classic formula): half for every time
    that the user holds the GPUs that his share entitles him to, and half again for every time that he used that share
    of late; the user's own jobs that go first count as held.
    """
    open_jobs = list(jobs)
    held = Counter(job.user for job in question.running if job.gpu is not None)
    users = {job.user for job in open_jobs} | set(held) | set(question.used_gpu_s)
    entitled = _entitlements(question, users)
    used = _used(question.used_gpu_s, entitled)
    gpus = max(1, sum(gpu.state != "bad" for node in question.nodes for gpu in node.gpus))
    found: dict[str, float] = {}
    for user, own in _by_user(open_jobs).items():
        alone = {job.id: _age(question, job) * _pressure(question, job) for job in own}
        own.sort(key=lambda job: (-job.priority, -alone[job.id] / cost[job.id], job.submitted_s, job.id))
        for place, job in enumerate(own):
            excess = (held[user] + place) / (gpus * entitled[user]) + used[user]
            found[job.id] = alone[job.id] * 2.0 ** -min(excess, 60.0)
    return found


def order(jobs: Iterable[WaitingJob], weight: Mapping[str, float], cost: Mapping[str, float]) -> list[WaitingJob]:
    """Higher priority first; within one, by weight per GPU second that it costs (Smith's rule), then by age."""
    return sorted(jobs, key=lambda job: (-job.priority, -weight[job.id] / cost[job.id], job.submitted_s, job.id))


def costs(question: Question, jobs: Iterable[WaitingJob]) -> dict[str, float]:
    """GPU seconds that each job takes from others, on the kind of node that suits it best; at least 1.

    A job that needs more than its GPU's part of the node's host memory takes as many GPUs as that part is of GPUs.
    """
    parts = _host_parts(question)
    return {
        job.id: max(1.0, min(o.seconds * max(1.0, o.host_bytes / parts.get(o.kind, math.inf)) for o in job.options))
        for job in jobs
    }


def _host_parts(question: Question) -> dict[str, float]:
    """Host memory per GPU, by kind, of the node that has most."""
    parts: dict[str, float] = {}
    for node in question.nodes:
        if node.gpus:
            parts[node.kind] = max(parts.get(node.kind, 1.0), node.host_bytes / len(node.gpus))
    return parts


def _best_seconds(job: WaitingJob) -> float:
    """Its run time on the kind of node that suits it best."""
    return min(option.seconds for option in job.options)


def _by_user(jobs: Iterable[WaitingJob]) -> dict[str, list[WaitingJob]]:
    found: dict[str, list[WaitingJob]] = defaultdict(list)
    for job in jobs:
        found[job.user].append(job)
    return dict(sorted(found.items()))


def _entitlements(question: Question, users: Iterable[str]) -> dict[str, float]:
    """Part of the cluster that each user is entitled to while these users want it."""
    shares = {user: question.rules.share(user) for user in sorted(users)}
    total = sum(shares.values())
    return {user: share / total for user, share in shares.items()}


def _used(used_gpu_s: Mapping[str, float], entitled: Mapping[str, float]) -> dict[str, float]:
    """Part of the recent use that each user had, over the part that he is entitled to."""
    total = sum(used_gpu_s.values())
    return {user: used_gpu_s.get(user, 0.0) / total / part if total > 0 else 0.0 for user, part in entitled.items()}


def _age(question: Question, job: WaitingJob) -> float:
    return 1.0 + max(0.0, question.now_s - job.submitted_s) / question.rules.ageing_s


def _pressure(question: Question, job: WaitingJob) -> float:
    if job.deadline_s is None:
        return 1.0
    run_s, left_s = _best_seconds(job), job.deadline_s - question.now_s
    return TIGHT if run_s <= left_s <= 2 * run_s else 1.0
