"""What all parts of a step share: the store, the machines, the lease, and a few notes that a restart may lose."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...jobs.errors import LazytrainError, Unreachable
from ...jobs.lifecycle import JobState
from ..admission import STAGE, Admission, Planner
from ..cluster.runs import Look, Runner
from ..store import Job, Lease, Move, Stale, Store
from .drifts import Drifts
from .meetings import Meetings
from .ports import Clock, Config, Decide

log = logging.getLogger(__name__)

ACTIVE = (JobState.STARTING, JobState.RUNNING, JobState.PAUSING, JobState.STOPPING, JobState.RECOVERING)
"""States in which something of a job may live on a node."""
ON_NODES = (*ACTIVE, JobState.PAUSED)
"""The same, and paused jobs, of which some keep their state in a node's memory."""
PREEMPTED, MOVING, SPILLING = "preempted", "moving", "spilling"
"""Why a job leaves its place: for another job, for a better place, or out of the memory that it keeps while paused."""
AT_ONCE_S = 0.3
"""How long a part of a step may be busy with jobs that wait; the rest of them has its turn in the next step."""
RESUMING = "resuming"
"""A paused job goes on: from memory (it starts), or its state goes into a checkpoint first (it is still paused)."""


@dataclass
class Notes:
    """What one controller has noticed about runs; another one notices it again, so every wait stays bounded."""

    since: dict[tuple[str, str], float] = field(default_factory=dict)
    """When something was first noticed about a claim."""
    beats: dict[str, int] = field(default_factory=dict)
    looks: dict[str, Look] = field(default_factory=dict)
    killed: set[str] = field(default_factory=set)
    inspected: dict[str, float] = field(default_factory=dict)
    """When each node was last asked what is there."""
    searched: set[str] = field(default_factory=set)
    """Runs of which is known whether they searched their batch."""
    settled: Hashable = None
    """What placement was asked when it last had nothing to do, and when that was."""
    settled_at: float = float("-inf")
    used: Mapping[str, float] = field(default_factory=dict)
    """GPU seconds of each user, and when they were counted."""
    used_at: float = float("-inf")
    plans: dict[str, tuple[float, Admission]] = field(default_factory=dict)
    """What is known of how jobs can run, each with the time at which it was written down."""
    found: dict[str, Admission | LazytrainError] = field(default_factory=dict)
    """What planning has answered and nobody has written down yet."""
    ordered: dict[str, Hashable] = field(default_factory=dict)
    """What planning was asked about each job that has no plan yet."""
    put_off: dict[str, float] = field(default_factory=dict)
    """Jobs that could not be planned for no fault of their own, each with when it is tried again."""
    meetings: Meetings = field(default_factory=Meetings)
    drifts: Drifts = field(default_factory=Drifts)
    foretold_at: float = float("-inf")
    """When expected times were last written down."""

    def waited(self, claim: str, what: str, now: float) -> float:
        """Seconds since ``what`` was first asked about here."""
        return now - self.since.setdefault((claim, what), now)

    def again(self, claim: str, what: str) -> None:
        """``what`` is over; the next time counts from then."""
        self.since.pop((claim, what), None)

    def keep_only(self, claims: Iterable[str]) -> None:
        """Forget all other claims."""
        kept = set(claims)
        self.since = {key: at for key, at in self.since.items() if key[0] in kept}
        self.beats = {claim: beat for claim, beat in self.beats.items() if claim in kept}
        self.looks = {claim: look for claim, look in self.looks.items() if claim in kept}
        self.killed &= kept
        self.searched &= kept
        self.drifts.keep_only(kept)


@dataclass
class Desk:
    """Given to every part of a step."""

    store: Store
    runner: Runner
    planner: Planner
    decide: Decide
    config: Config
    clock: Clock
    steady: Clock
    """For how long something takes: unlike ``clock``, nobody sets it."""
    lease: Lease
    notes: Notes = field(default_factory=Notes)

    def move(self, job: Job, to: JobState, reason: str, sentence: str, **changes: Any) -> Job:
        """Change the job's state; Stale and Conflict as in `store`."""
        moved = self.store.jobs.move(job, Move(to, reason, sentence), self.clock(), self.lease, **changes)
        if to.final and self.config.mlflow_uri:
            self.config.close_tracking(job.id)
        return moved

    def tell(self, job: Job, reason: str, sentence: str) -> Job:
        """Change only why the job is as it is."""
        if (job.reason, job.sentence) == (reason, sentence):
            return job
        return self.store.jobs.annotate(job, self.clock(), self.lease, reason=reason, sentence=sentence)

    def plans(self, jobs: Iterable[Job]) -> dict[str, Admission]:
        """How each of the jobs that are planned can run. Plans are large and seldom change: each is read once."""
        asked = [job.id for job in jobs]
        known = self.notes.plans
        there = self.store.jobs.stage_times(asked, STAGE)
        changed = [name for name, at in there.items() if name not in known or known[name][0] != at]
        for name, plan in self.store.jobs.stages_of(changed, STAGE).items() if changed else ():
            known[name] = (there[name], Admission.model_validate(plan))
        return {name: known[name][1] for name in asked if name in there and name in known}

    def write_plan(self, job: Job, plan: Admission) -> None:
        """Record how the job can run, in place of what was known."""
        self.notes.plans.pop(job.id, None)
        now = self.clock()
        self.store.jobs.finish_stage(job, STAGE, plan.model_dump(mode="json"), now, self.lease, again=True)

    def _keep_the_lease(self) -> None:
        """A step for very many jobs may take longer than the lease. Raises Stale when somebody else leads now."""
        now = self.clock()
        if self.lease.expires_at - now >= 0.5 * self.config.lease_s:
            return
        lease = self.store.leases.take(self.lease.name, self.lease.owner, now, self.config.lease_s)
        if lease is None or lease.epoch != self.lease.epoch:
            raise Stale("this controller leads no more")
        self.lease = lease

    def for_each(self, jobs: Iterable[Job], work: Callable[[Job], None], *, within_s: float = math.inf) -> bool:
        """Do ``work`` for each job; one that was changed meanwhile is left for the next step.

        After ``within_s`` all others are left for the next step too, and False is returned: somebody may have asked for
        something meanwhile.
        """
        began = self.clock()
        for job in jobs:
            if self.clock() - began > within_s:
                return False
            self._keep_the_lease()
            try:
                work(job)
            except Stale as error:
                log.info("left for the next step: %s", error)
            except Unreachable:
                raise
            except Exception:  # what is wrong with one job must not keep the others waiting
                log.exception("job %s is left as it is", job.id)
        return True
