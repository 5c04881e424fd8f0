"""Paused jobs that keep their state in the memory of their node.

RUNNING  --pause-->   PAUSING   the training gives its GPU up after the step, and its process waits
         --paused-->  PAUSED    with a claim: the state is in memory; without one: in a checkpoint
PAUSED   --resume-->  STARTING  on the GPU that it had, if that is free
                      QUEUED    else its state goes into a checkpoint, and it waits for any place
"""

from __future__ import annotations

from pathlib import Path

from ...jobs.errors import Unreachable
from ...jobs.lifecycle import JobState
from ..cluster.runs import Look, Phase
from ..store import Job
from .desk import ACTIVE, RESUMING, SPILLING, Desk
from .leaving import make_it_leave

_S = JobState
_PAUSED = "paused"


def pauses_in_memory(desk: Desk, job: Job, claim: str) -> bool:
    """Whether it was asked to pause and has not taken too long: after that its state goes into a checkpoint."""
    if job.state is not _S.PAUSING or job.reason != _PAUSED:
        return False
    return desk.notes.waited(claim, "pause", desk.steady()) < desk.config.pause_timeout_s


def make_it_pause(desk: Desk, job: Job, claim: str, look: Look) -> None:
    """Ask, until its process holds no GPU any more."""
    if look.phase is Phase.PAUSED:
        desk.notes.again(claim, "pause")
        words = f"{job.sentence}; its state is in the memory of {job.node}"
        desk.move(job, _S.PAUSED, _PAUSED, words, outcome=_progress(look), gpu=None, last_gpu=job.gpu)
    else:
        desk.runner.pause(claim, Path(job.run_dir))


def keep_paused(desk: Desk, job: Job, claim: str, look: Look) -> None:
    """Let it leave when its memory is wanted, and see that it does not train on by itself."""
    if job.reason in (SPILLING, RESUMING):
        make_it_leave(desk, job, claim)
    elif look.phase is not Phase.PAUSED:
        desk.runner.pause(claim, Path(job.run_dir))


def make_it_resume(desk: Desk, job: Job, claim: str) -> None:
    """It is to go on and has not yet: give it its GPU again, or after too long let it leave."""
    desk.runner.resume(claim, Path(job.run_dir))
    if desk.notes.waited(claim, "start", desk.steady()) >= desk.config.start_timeout_s:
        desk.runner.stop(claim, Path(job.run_dir))


def resume(desk: Desk, job: Job) -> None:
    """Let a paused job go on: at once from memory if its GPU is free, else from a checkpoint when it has a place."""
    if job.claim is None:
        # Its turn counts from now: until now it was its user who let it wait.
        words = "waits to go on from where it was paused"
        desk.move(job, _S.QUEUED, "planned", words, queued_at=desk.clock())
    elif job.reason != SPILLING and _gpu_is_free(desk, job):
        words = f"goes on from the memory of {job.node}"
        job = desk.move(job, _S.STARTING, RESUMING, words, gpu=job.last_gpu)
        try:
            desk.runner.resume(job.claim or "", Path(job.run_dir))
        except Unreachable:
            return  # asked again as long as it starts
    else:
        words = "its GPU is not free: its state goes into a checkpoint, and it goes on at the first place that is"
        desk.tell(job, RESUMING, words)


def spilled(desk: Desk, job: Job, outcome: dict[str, object], *, saved: bool) -> None:
    """A paused job's process has ended, its memory is free. It stays paused, or waits for a place to go on."""
    lost = "" if saved else "; what it had in memory is lost, its last checkpoint is not"
    if job.reason == RESUMING:
        words = f"waits to go on from where it was paused{lost}"
        desk.move(job, _S.QUEUED, "planned", words, claim=None, outcome=outcome, queued_at=desk.clock())
        return
    desk.store.jobs.annotate(
        job,
        desk.clock(),
        desk.lease,
        reason=_PAUSED if saved else "lost",
        sentence=f"paused; its state is in a checkpoint{lost}",
        claim=None,
        outcome=outcome,
    )


def _gpu_is_free(desk: Desk, job: Job) -> bool:
    node = next((node for node in desk.store.nodes.list() if node.name == job.node), None)
    if node is None or not node.alive or node.drained or node.problem:
        return False
    return all((other.node, other.gpu) != (job.node, job.last_gpu) for other in desk.store.jobs.list(states=ACTIVE))


def _progress(look: Look) -> dict[str, object]:
    return {"how": "paused", "step": look.step, "code": "", "message": ""}
