"""Looking at what runs, and moving each job to the state that it is really in."""

from __future__ import annotations

from pathlib import Path

from ...jobs.lifecycle import JobState
from ..cluster.runs import Look, Outcome, Phase
from ..store import Job
from .desk import ON_NODES, Desk
from .drift import adapt
from .drifts import CALIBRATED
from .endings import fail, lost, requeue, settle
from .failures import Failure
from .leaving import kill, make_it_leave
from .pausing import keep_paused, make_it_pause, make_it_resume, pauses_in_memory
from .searched import take_in

_S = JobState
_SEARCHING = "searching_batch"


def watch(desk: Desk) -> None:
    """Look at every job that may live on a node."""
    jobs = [job for job in desk.store.jobs.list(states=ON_NODES) if job.state is not _S.PAUSED or job.claim]
    desk.notes.keep_only(job.claim for job in jobs if job.claim)
    desk.for_each(jobs, lambda job: _watch(desk, job))
    _end_strays(desk)


def _watch(desk: Desk, job: Job) -> None:
    if job.claim is None:
        _without_a_run(desk, job)
        return
    look = desk.runner.look(job.claim, Path(job.run_dir), job.attempt)
    desk.notes.looks[job.claim] = look
    if look.phase is Phase.ENDED and look.outcome is not None:
        settle(desk, job, look.outcome)
    elif look.phase is Phase.ABSENT and job.state is _S.STARTING:
        # Between the record of the start and the start itself the controller was interrupted.
        desk.move(job, _S.QUEUED, "planned", "its start was interrupted before it began", claim=None, gpu=None)
    elif look.phase in (Phase.ABSENT, Phase.LOST):
        if desk.notes.waited(job.claim, "lost", desk.steady()) >= desk.config.lost_grace_s:
            lost(desk, job)
    else:
        desk.notes.again(job.claim, "lost")
        _alive(desk, job, job.claim, look)


def _without_a_run(desk: Desk, job: Job) -> None:
    if job.state is _S.STOPPING:
        desk.move(job, _S.STOPPED, "stopped", "stopped as asked")
    elif job.state is _S.RECOVERING:
        requeue(desk, job)
    else:
        lost(desk, job)


def _alive(desk: Desk, job: Job, claim: str, look: Look) -> None:
    if job.state is _S.RECOVERING:
        kill(desk, claim)
    elif job.state is _S.PAUSED:
        keep_paused(desk, job, claim, look)
    elif pauses_in_memory(desk, job, claim):
        make_it_pause(desk, job, claim, look)
    elif job.state in (_S.STOPPING, _S.PAUSING):
        make_it_leave(desk, job, claim)
    elif look.phase is Phase.PAUSED:
        make_it_resume(desk, job, claim)
    elif look.phase is Phase.RUNNING:
        if job.state is _S.STARTING:
            desk.notes.again(claim, "start")
            job = desk.move(job, _S.RUNNING, "running", f"trains on {job.node}", started_at=desk.clock())
        job = _tell_what_it_does(desk, job, look)
        if look.step and claim not in desk.notes.searched:
            desk.notes.searched.add(claim)
            take_in(desk, job)
        _expect_beats(desk, job, claim, look)
        adapt(desk, job, claim, look)
    elif desk.notes.waited(claim, "start", desk.steady()) >= desk.config.start_timeout_s:
        kill(desk, claim)
        words = f"the run did not begin within {desk.config.start_timeout_s:g} s"
        fail(desk, job, Failure.NODE_LOST, Outcome(how="died", message=words))


def _tell_what_it_does(desk: Desk, job: Job, look: Look) -> Job:
    if look.doing:
        return desk.tell(job, _SEARCHING, f"measures batches on {job.node} before it trains: {look.doing}")
    return desk.tell(job, "running", f"trains on {job.node}") if job.reason in (_SEARCHING, CALIBRATED) else job


def _expect_beats(desk: Desk, job: Job, claim: str, look: Look) -> None:
    if desk.notes.beats.get(claim) != look.beat:
        desk.notes.beats[claim] = look.beat
        desk.notes.again(claim, "beat")
    if desk.notes.waited(claim, "beat", desk.steady()) >= desk.config.beat_timeout_s:
        kill(desk, claim)
        words = f"the training process gave no sign of life for {desk.config.beat_timeout_s:g} s"
        fail(desk, job, Failure.NODE_LOST, Outcome(how="died", message=words, step=look.step))


def _end_strays(desk: Desk) -> None:
    """End runs that no job claims: their job was given up, or is started again elsewhere."""
    strays = desk.runner.runs()
    if strays:
        # Read after the list of runs: a run is recorded before it is started.
        strays -= {job.claim for job in desk.store.jobs.list(states=ON_NODES) if job.claim}
    for claim in strays:
        desk.runner.kill(claim)
