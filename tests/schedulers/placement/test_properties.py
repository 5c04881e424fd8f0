"""What holds for every question, and for a queue over time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lazytrain.schedulers.placement import Decisions, Gpu, Question, Rules, WaitCode, decide

GIB = 1 << 30
HOUR = 3600.0


def random_question(make: Any, seed: int) -> Question:
    """Nodes of two kinds with bad, foreign and busy GPUs, and jobs of every kind of need."""
    draw = random.Random(seed)
    nodes = []
    for i in range(4):
        cards = tuple(
            Gpu(id=str(g), state=draw.choice(["free", "free", "free", "bad", "busy"]), pcie_root=str(g // 2))
            for g in range(draw.randint(1, 4))
        )
        kind = draw.choice(["H800", "RTX3090"])
        nodes.append(
            make.node(f"n{i}", kind, cards=cards, host=draw.choice([60, 100]), drained=draw.random() < 0.1,
                      dram_bytes_s=draw.choice([100.0, float("inf")]), nvme_bytes=draw.choice([0, 50 * GIB]))
        )  # fmt: skip
    running = [
        make.running(f"r{node.name}{gpu.id}", node.name, gpu.id, kind=node.kind, host=10,
                     user=draw.choice("abc"), priority=draw.randint(0, 100), remaining_s=draw.uniform(0, 9 * HOUR))
        for node in nodes for gpu in node.gpus if gpu.state == "free" and draw.random() < 0.4
    ]  # fmt: skip
    waiting = [
        make.job(f"w{i}", kinds=draw.choice([("H800",), ("RTX3090",), ("H800", "RTX3090")]),
                 hours=draw.uniform(0.1, 20), host=draw.choice([5, 20, 40, 80, 120]), user=draw.choice("abc"),
                 priority=draw.choice([0, 50, 50, 90]), submitted_s=-draw.uniform(0, 40 * HOUR),
                 after=("w0",) if i and draw.random() < 0.1 else (),
                 needs={"dram_bytes_s": draw.uniform(0, 80), "nvme_bytes": draw.choice([0, 0, 30 * GIB])})
        for i in range(draw.randint(0, 25))
    ]  # fmt: skip
    rules = Rules(quota={"a": {"H800": 2}}, moving=draw.random() < 0.5)
    return Question(now_s=0.0, waiting=tuple(waiting), running=tuple(running), nodes=tuple(nodes), rules=rules)


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_handed_out_twice_or_beyond_what_there_is(make: Any, seed: int) -> None:
    question = random_question(make, seed)
    decisions = decide(question, seconds=5)
    jobs = {job.id: job for job in question.waiting}
    assert sorted([s.job for s in decisions.starts] + [w.job for w in decisions.waits]) == sorted(jobs)
    held = {(job.node, job.gpu) for job in question.running}
    for node in question.nodes:
        starts = [start for start in decisions.starts if start.node == node.name]
        options = [job.option for job in question.running if job.node == node.name] + [s.option for s in starts]
        free = [gpu.id for gpu in node.gpus if gpu.state == "free" and (node.name, gpu.id) not in held]
        assert len({s.gpu for s in starts}) == len(starts) and {s.gpu for s in starts} <= set(free)
        assert not starts or node.open
        assert all(s.option == jobs[s.job].option(node.kind) for s in starts)
        if starts:
            assert sum(option.host_bytes for option in options) <= node.host_bytes
            assert sum(option.nvme_bytes for option in options) <= node.nvme_bytes
    for start in decisions.starts:
        assert not any(name in jobs for name in jobs[start.job].after)
    users = Counter(j.user for j in question.running if j.option.kind == "H800")
    users.update(jobs[s.job].user for s in decisions.starts if s.option.kind == "H800")
    assert users["a"] <= max(2, sum(j.user == "a" and j.option.kind == "H800" for j in question.running))
    assert all(wait.words and (wait.start_s or 0.0) >= 0.0 for wait in decisions.waits)


@pytest.mark.parametrize("seed", range(60))
def test_only_jobs_that_may_leave_are_told_to(make: Any, seed: int) -> None:
    """Once each; for a clearly higher priority, or for a faster GPU of their own."""
    question = random_question(make, seed)
    options = {job.id: (make.option("H800", hours=1), make.option("RTX3090", hours=10)) for job in question.running}
    running = tuple(replace(job, moves=options[job.id], started_s=-900.0 * (seed % 4)) for job in question.running)
    question = replace(question, running=running)
    decisions = decide(question, seconds=5)
    jobs = {job.id: job for job in [*question.running, *question.waiting]}
    assert len({preempt.job for preempt in decisions.preempts}) == len(decisions.preempts)
    for preempt in decisions.preempts:
        victim, other = jobs[preempt.job], jobs[preempt.for_job]
        assert question.now_s - victim.started_s >= question.rules.min_run_s
        moves = victim is other and question.rules.moving
        assert moves or other.priority >= victim.priority + question.rules.preempt_margin


@pytest.mark.parametrize("seed", range(20))
def test_equal_questions_get_equal_decisions(make: Any, seed: int) -> None:
    first, second = (decide(random_question(make, seed), seconds=5) for _ in range(2))
    assert (first.starts, first.waits, first.preempts) == (second.starts, second.waits, second.preempts)


@pytest.mark.parametrize("seed", range(60))
def test_no_gpu_is_idle_while_a_job_could_use_it(make: Any, seed: int) -> None:
    """Whoever waits although a GPU has room for it waits for a reason that says so."""
    question = random_question(make, seed)
    decisions = decide(question, seconds=5)
    taken = {(start.node, start.gpu) for start in decisions.starts} | {(j.node, j.gpu) for j in question.running}
    for wait in decisions.waits:
        if wait.code == WaitCode.GPU_BUSY:
            job = next(job for job in question.waiting if job.id == wait.job)
            for node in question.nodes:
                option = job.option(node.kind)
                free = [g for g in node.gpus if g.state == "free" and (node.name, g.id) not in taken]
                large = option is not None and option.host_bytes <= node.host_bytes
                blocked = option is not None and option.nvme_bytes > node.nvme_bytes
                quota = job.user == "a" and node.kind == "H800"
                assert not (free and node.open and large and not blocked and not quota)


class Queue:
    """A simulated clock over decisions: jobs run for as long as their option says."""

    def __init__(self, nodes: list[Any], rules: Rules) -> None:
        self.nodes, self.rules = tuple(nodes), rules
        self.now_s = 0.0
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.started: dict[str, float] = {}

    def step(self, make: Any) -> Decisions:
        """Decide and start."""
        question = Question(
            now_s=self.now_s, waiting=tuple(self.waiting), running=tuple(self.running), nodes=self.nodes,
            rules=self.rules,
        )  # fmt: skip
        decisions = decide(question)
        for start in decisions.starts:
            job = next(job for job in self.waiting if job.id == start.job)
            self.waiting.remove(job)
            self.started[job.id] = self.now_s
            self.running.append(
                make.running(
                    job.id, start.node, start.gpu, user=job.user, priority=job.priority, started_s=self.now_s,
                    remaining_s=start.option.seconds, waited_s=self.now_s - job.submitted_s,
                )
            )  # fmt: skip
            self.running[-1] = replace(self.running[-1], option=start.option)
        return decisions

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
        left = [replace(job, remaining_s=job.remaining_s - seconds) for job in self.running]
        self.running = [job for job in left if job.remaining_s > 1e-6]


def endless_small_jobs(make: Any, *, size: int, priority: int) -> tuple[float, float]:
    """When a big job starts among small ones that never end, and how busy the other node is meanwhile."""
    rules = Rules(reserve_after_s=5 * HOUR, ageing_s=1e9)
    queue = Queue([make.node("big", gpus=4, host=100), make.node("other", gpus=2, host=40)], rules)
    queue.waiting.append(make.job("big", hours=3, host=size, priority=priority))
    busy, steps = 0, 0
    while "big" not in queue.started and queue.now_s < 40 * HOUR:
        while sum(job.id != "big" for job in queue.waiting) < 8:
            name = f"small-{len(queue.started) + len(queue.waiting)}"
            small = make.job(name, hours=1, host=20, user="eve", submitted_s=queue.now_s)
            queue.waiting.append(small)
        queue.step(make)
        busy += sum(job.node == "other" for job in queue.running)
        steps += 1
        queue.advance(HOUR / 4)
    return queue.started.get("big", float("inf")), busy / (2 * steps)


@pytest.mark.parametrize("priority", [50, 0])
def test_endless_small_jobs_do_not_starve_a_big_one(make: Any, priority: int) -> None:
    """U88: it starts within T and the longest small job, and the other node stays busy."""
    started_s, busy = endless_small_jobs(make, size=90, priority=priority)
    assert started_s <= 5 * HOUR + HOUR
    assert started_s >= 4 * HOUR, "without the reservation's help it would not start at all"
    assert busy == 1.0


def test_two_users_share_by_their_weights_over_time(make: Any) -> None:
    """Equal jobs of two users without end; one has three times the other's share."""
    queue = Queue([make.node("h", gpus=8, host=999)], Rules(shares={"ada": 3.0, "eve": 1.0}, ageing_s=1e9))
    served: Counter[str] = Counter()
    for step in range(30):
        for user in ("ada", "eve"):
            own = sum(job.user == user for job in queue.waiting)
            for i in range(10 - own):
                queue.waiting.append(make.job(f"{user}-{step}-{i}", user=user, submitted_s=queue.now_s))
        queue.step(make)
        served.update(job.user for job in queue.running)
        queue.advance(HOUR)
    assert 2.5 <= served["ada"] / served["eve"] <= 3.5
