"""When each waiting job is expected to run: jobs in order, each where it ends first (a list schedule)."""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .ledger import Ledger
from .question import Option, Question, RunningJob, WaitingJob


@dataclass(frozen=True, slots=True)
class Expected:
    """When and where a job is expected to run."""

    node: str
    option: Option
    start_s: float
    end_s: float
    later_s: float
    """When it would end if it did not start now."""


class Forecast:
    """Places jobs one after the other on the ledgers of all nodes, which start with the running jobs."""

    def __init__(self, question: Question) -> None:
        self._question = question
        running: dict[str, list[RunningJob]] = defaultdict(list)
        for job in question.running:
            running[job.node].append(job)
        self.ledgers = {node.name: Ledger(node, running[node.name], question.now_s) for node in question.nodes}
        self._by_kind: dict[str, list[str]] = defaultdict(list)
        for name, ledger in self.ledgers.items():
            if ledger.usable:
                self._by_kind[ledger.node.kind].append(name)
        self._user_ends: dict[tuple[str, str], list[float]] = defaultdict(list)
        for job in question.running:
            if job.gpu is not None:
                self._count(job.user, self.ledgers[job.node].node.kind, question.now_s + job.remaining_s)
        self.ends = {job.id: question.now_s + job.remaining_s for job in question.running}
        """When running jobs and those that have been placed are expected to end."""

    def copy(self) -> Forecast:
        """A forecast of its own that has placed the same jobs."""
        twin = object.__new__(Forecast)
        twin._question, twin._by_kind = self._question, self._by_kind
        twin.ledgers = {name: ledger.copy() for name, ledger in self.ledgers.items()}
        twin._user_ends = defaultdict(list, {key: list(ends) for key, ends in self._user_ends.items()})
        twin.ends = dict(self.ends)
        return twin

    def run(self, jobs: Sequence[WaitingJob]) -> dict[str, Expected]:
        """What is expected of ``jobs``, placed in this order but after what they wait for; without hopeless ones."""
        found: dict[str, Expected] = {}
        open_ids = {job.id for job in self._question.waiting} - set(self.ends)
        rest = list(jobs)
        while rest:
            ready = [job for job in rest if open_ids.isdisjoint(job.after)]
            rest = [job for job in rest if not open_ids.isdisjoint(job.after)]
            if not ready:
                break
            for job in ready:
                expected = self.place(job)
                if expected is not None:
                    found[job.id] = expected
                    open_ids.discard(job.id)
        return found

    def place(self, job: WaitingJob) -> Expected | None:
        """Place one job where it ends first; None, and nothing placed, if it can run nowhere as things stand."""
        expected = self.look(job)
        if expected is not None:
            self.put(job, expected)
        return expected

    def look(self, job: WaitingJob) -> Expected | None:
        """Where ``job`` would end first."""
        now_s = self._question.now_s
        ready_s = max([now_s, *(self.ends.get(name, now_s) for name in job.after)])
        best: tuple[float, float, str, Option] | None = None
        later_s = math.inf
        for option in job.options:
            allowed_s = self._quota_start(job.user, option.kind, ready_s)
            for name in self._by_kind.get(option.kind, ()):
                if job.nodes and name not in job.nodes:
                    continue
                start_s = self.ledgers[name].earliest(option, allowed_s)
                if start_s is None:
                    continue
                end_s = start_s + option.seconds
                if best is None or end_s < best[0]:
                    best = (end_s, start_s, name, option)
                again_s = start_s if start_s > now_s else self.ledgers[name].next_free(now_s)
                later_s = min(later_s, again_s + option.seconds)
        if best is None:
            return None
        end_s, start_s, name, option = best
        return Expected(name, option, start_s, end_s, later_s if later_s < math.inf else end_s + self._patience(job))

    def put(self, job: WaitingJob, expected: Expected) -> None:
        """Hold what is expected."""
        self.ledgers[expected.node].place(expected.option, expected.start_s, expected.end_s)
        self._count(job.user, expected.option.kind, expected.end_s)
        self.ends[job.id] = expected.end_s

    def _patience(self, job: WaitingJob) -> float:
        """Where every GPU that it could have is idle, nothing says how long it would wait: at most the longest run."""
        return max(option.seconds for option in job.options)

    def _count(self, user: str, kind: str, end_s: float) -> None:
        """Note when a job ends whose user has a quota."""
        if self._question.rules.most_gpus(user, kind) < math.inf:
            insort(self._user_ends[user, kind], end_s)

    def may_have(self, user: str, kind: str) -> bool:
        """Whether the quota lets the user have one more GPU of that kind now."""
        return self.quota_left(user, kind) > 0

    def quota_left(self, user: str, kind: str) -> float:
        """How many more GPUs of that kind the user may have now; infinity without a quota."""
        return self._question.rules.most_gpus(user, kind) - len(self._user_ends[user, kind])

    def _quota_start(self, user: str, kind: str, ready_s: float) -> float:
        """When the quota lets the user have one more GPU of that kind."""
        most = self._question.rules.most_gpus(user, kind)
        if most == math.inf:
            return ready_s
        if most < 1:
            return math.inf
        ends = self._user_ends[user, kind]
        return max(ready_s, ends[-int(most)]) if len(ends) >= most else ready_s
