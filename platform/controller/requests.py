"""Doing what was asked of jobs, or saying why not."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from ...jobs.errors import LazytrainError, NotFound
from ...jobs.lifecycle import JobState
from ..artifacts import JobFiles
from ..store import Action, Job, Request, Stale
from .desk import SPILLING, Desk
from .leaving import ask_to_leave
from .pausing import resume

log = logging.getLogger(__name__)
_S = JobState


def do_requests(desk: Desk) -> None:
    """Answer every request that waits, in the order of asking."""
    answers: dict[int, str] = {}
    for request in desk.store.jobs.requests():
        try:
            answers[request.id] = _do(desk, request)
        except Stale:
            continue  # the job changed meanwhile: asked again in the next step
        except LazytrainError as error:
            answers[request.id] = error.message
        except OSError as error:  # of the job's folder, which its user may have deleted or filled
            log.warning("request %d to %s job %s: %s", request.id, request.action.value, request.job, error)
            answers[request.id] = f"{request.action.value} failed: {error}"
    # All at once: to be asked again, after a kill in between, does no harm.
    desk.store.jobs.answer_all(answers, desk.clock())


def _do(desk: Desk, request: Request) -> str:
    try:
        job = desk.store.jobs.get(request.job)
    except NotFound as error:
        return error.message
    return _DOERS[request.action](desk, job, request)


def _stop(desk: Desk, job: Job, request: Request) -> str:
    words = f"{request.user} asked for it"
    if job.state is _S.QUEUED or (job.state is _S.PAUSED and job.claim is None):
        desk.move(job, _S.STOPPED, "stopped", f"stopped before it ran: {words}" if not job.attempt else "stopped")
    elif job.state in (_S.STARTING, _S.RUNNING, _S.PAUSING, _S.PAUSED, _S.RECOVERING):
        job = desk.move(job, _S.STOPPING, "stopping", f"saves its state and leaves: {words}")
        _ask_to_leave(desk, job)
    return ""  # stopping what has ended, or is stopping, is done


def _pause(desk: Desk, job: Job, request: Request) -> str:
    """In memory, or with ``checkpoint`` in a checkpoint, so that nothing of the job stays on the node."""
    words = f"paused: {request.user} asked for it"
    if job.state is _S.RUNNING and request.argument.get("checkpoint"):
        job = desk.move(job, _S.PAUSING, SPILLING, words)
        _ask_to_leave(desk, job)
    elif job.state is _S.RUNNING:
        job = desk.move(job, _S.PAUSING, "paused", words)
        if job.claim is not None:
            desk.runner.pause(job.claim, Path(job.run_dir))
    elif job.state is _S.PAUSED and job.claim is not None and request.argument.get("checkpoint"):
        job = desk.tell(job, SPILLING, f"{request.user} asked for it: its state goes into a checkpoint")
        _ask_to_leave(desk, job)
    elif job.state not in (_S.PAUSING, _S.PAUSED):
        return f"job {job.id} is {job.state.value}: only a running job can be paused"
    return ""


def _resume(desk: Desk, job: Job, request: Request) -> str:
    if job.state is _S.PAUSED:
        resume(desk, job)
        return ""
    if job.state in (_S.QUEUED, _S.STARTING, _S.RUNNING):
        return ""
    return f"job {job.id} is {job.state.value}: only a paused job can be resumed"


def _set(desk: Desk, job: Job, request: Request) -> str:
    if job.state.final:
        return f"job {job.id} has ended: {job.state.value}"
    desk.store.jobs.annotate(job, desk.clock(), desk.lease, priority=int(request.argument["priority"]))
    return ""


def _remove(desk: Desk, job: Job, request: Request) -> str:
    if not job.state.final:
        return f"job {job.id} is {job.state.value}: stop it before it is removed"
    if request.argument.get("files") and JobFiles(job.run_dir).belongs_to(job.id):
        shutil.rmtree(job.run_dir)
    desk.store.jobs.annotate(job, desk.clock(), desk.lease, removed_at=desk.clock())
    return ""


def _ask_to_leave(desk: Desk, job: Job) -> None:
    if job.claim is not None:
        ask_to_leave(desk, job, job.claim)


_DOERS: dict[Action, Callable[[Desk, Job, Request], str]] = {
    Action.STOP: _stop,
    Action.PAUSE: _pause,
    Action.RESUME: _resume,
    Action.SET: _set,
    Action.REMOVE: _remove,
}
