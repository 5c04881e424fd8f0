"""Routes of jobs: submit, list, look, and ask for changes."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response

from ...jobs.errors import Conflict, NotFound
from ...jobs.lifecycle import JobState
from .. import schemas
from ..store import Action, Job, NewJob, Role, Store
from .access import OwnJob, SettingsOf, StoreOf, Submitter, Viewer, VisibleJob, sees_all
from .submission import new_job
from .views import event_view, job_view

router = APIRouter(tags=["jobs"])

_Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")]
_Limit = Annotated[int, Query(ge=1, le=1000)]
_LIVE = [state for state in JobState if not state.final]


@router.post("/jobs", status_code=201)
def submit(
    body: schemas.Submission,
    response: Response,
    user: Submitter,
    store: StoreOf,
    settings: SettingsOf,
    key: _Key = None,
) -> schemas.JobView:
    """Put a job into the queue. The same ``Idempotency-Key`` with the same body gives the same job, with status 200."""
    _check_after(store, body.after, user.name, everybody=user.role is Role.ADMIN)
    asked = new_job(body.spec, tuple(body.after), user.name, key, settings)
    job, is_new = store.jobs.create(asked, time.time())
    response.status_code = 201 if is_new else 200
    return job_view(job)


@router.get("/jobs")
def list_jobs(
    user: Viewer,
    store: StoreOf,
    state: Annotated[list[JobState] | None, Query()] = None,
    owner: Annotated[str | None, Query(max_length=100, pattern=r"^[\x21-\x7e]+$")] = None,
    limit: _Limit = 100,
    before: Annotated[str | None, Query(pattern=r"^[0-9]{1,12}(\.[0-9]{1,20})?~j-[0-9a-f]{10}$")] = None,
) -> schemas.JobPage:
    """Jobs, newest first."""
    jobs = store.jobs.list(
        states=state,
        user=owner if sees_all(user) else user.name,
        limit=limit + 1,
        before=_cursor(before) if before else None,
        specs=False,
    )
    page = jobs[:limit]
    more = len(jobs) > limit
    return schemas.JobPage(
        jobs=[job_view(job) for job in page], next=f"{page[-1].created_at!r}~{page[-1].id}" if more else None
    )


@router.post("/jobs/stop", status_code=202)
def stop_many(body: schemas.StopMany, user: Submitter, store: StoreOf) -> schemas.Accepted:
    """Stop many jobs at once, or all of one's own. Ids of jobs that one may not stop are refused as a whole."""
    mine = None if user.role is Role.ADMIN else user.name
    if body.all:
        ids = [job.id for job in store.jobs.list(states=_LIVE, user=user.name if mine else None, specs=False)]
    else:
        known = {job.id for job in store.jobs.list(ids=body.ids, user=mine, specs=False)}
        unknown = [job_id for job_id in body.ids if job_id not in known]
        if unknown:
            raise NotFound(f"there is no job {unknown[0]}", hint="lazytrain ps lists the jobs")
        ids = list(dict.fromkeys(body.ids))
    return schemas.Accepted(requests=list(store.jobs.ask(ids, user.name, Action.STOP, time.time())))


@router.get("/jobs/{job_id}")
def show(job: VisibleJob, settings: SettingsOf) -> schemas.JobView:
    """One job, with its job file."""
    return job_view(job, spec=True, mlflow_pages=settings.mlflow_pages)


@router.patch("/jobs/{job_id}", status_code=202)
def change(body: schemas.PriorityChange, job: OwnJob, user: Submitter, store: StoreOf) -> schemas.Accepted:
    """Give a job another priority."""
    return _ask(store, job, user.name, Action.SET, priority=body.priority)


@router.delete("/jobs/{job_id}", status_code=202)
def remove(job: OwnJob, user: Submitter, store: StoreOf, files: bool = False) -> schemas.Accepted:
    """Take a job that has ended off the list; with ``files`` also delete its folder, the trained model included."""
    if not job.state.final:
        raise Conflict(f"job {job.id} is {job.state.value}", hint="stop it first")
    return _ask(store, job, user.name, Action.REMOVE, files=files)


@router.post("/jobs/{job_id}/stop", status_code=202)
def stop(job: OwnJob, user: Submitter, store: StoreOf) -> schemas.Accepted:
    """Let a job save its state and leave; possible in every state."""
    return _ask(store, job, user.name, Action.STOP)


@router.post("/jobs/{job_id}/pause", status_code=202)
def pause(job: OwnJob, user: Submitter, store: StoreOf, checkpoint: bool = False) -> schemas.Accepted:
    """Free the GPU of a running job, which goes on later from where it was. Its state stays in the memory of its node
    until another job needs that; with ``checkpoint`` it goes to disk at once, also that of a job which is paused."""
    return _ask(store, job, user.name, Action.PAUSE, checkpoint=checkpoint)


@router.post("/jobs/{job_id}/resume", status_code=202)
def resume(job: OwnJob, user: Submitter, store: StoreOf) -> schemas.Accepted:
    """Let a paused job go on."""
    return _ask(store, job, user.name, Action.RESUME)


@router.post("/jobs/{job_id}/retry", status_code=201)
def retry(
    job: OwnJob,
    response: Response,
    user: Submitter,
    store: StoreOf,
    settings: SettingsOf,
    fresh: bool = False,
    key: _Key = None,
) -> schemas.JobView:
    """Put the same job into the queue again, as a new one. It goes on from the last checkpoint, if there is one; with
    ``fresh``, or if the job has succeeded, it begins anew."""
    if not job.state.final:
        raise Conflict(f"job {job.id} is {job.state.value}", hint="only a job that has ended can be submitted again")
    continues = None if fresh or job.state is JobState.SUCCEEDED else job.id
    again: NewJob = new_job(job.spec, (), job.user, key, settings, continues=continues)
    made, is_new = store.jobs.create(again, time.time())
    response.status_code = 201 if is_new else 200
    return job_view(made)


@router.get("/jobs/{job_id}/events")
def events(
    job: VisibleJob, store: StoreOf, since: Annotated[int, Query(ge=0, le=2**62)] = 0, limit: _Limit = 1000
) -> schemas.EventPage:
    """What happened to a job, oldest first, after event ``since``."""
    return schemas.EventPage(events=[event_view(e) for e in store.jobs.events(job.id, since=since, limit=limit)])


@router.get("/requests/{number}")
def request(number: int, user: Viewer, store: StoreOf) -> schemas.RequestAnswer:
    """What became of something that was asked for."""
    if not 0 < number < 2**62:
        raise NotFound(f"there is no request {number}")
    text = store.jobs.answer_to(number, user=None if sees_all(user) else user.name)
    return schemas.RequestAnswer(done=text is not None, answer=text or "")


def _ask(store: Store, job: Job, user: str, action: Action, **argument: object) -> schemas.Accepted:
    return schemas.Accepted(requests=list(store.jobs.ask([job.id], user, action, time.time(), **argument)))


def _check_after(store: Store, after: list[str], user: str, *, everybody: bool) -> None:
    known = {job.id for job in store.jobs.list(ids=after, user=None if everybody else user)} if after else set()
    for name in after:
        if name not in known:
            raise NotFound(f"there is no job {name} to come after")


def _cursor(text: str) -> tuple[float, str]:
    at, _, job_id = text.partition("~")
    return float(at), job_id
