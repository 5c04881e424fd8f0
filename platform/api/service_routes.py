"""Routes of the service as a whole: nodes, queue, planning, users, health."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Path, Request

from ...jobs.lifecycle import JobState
from .. import schemas
from ..store import Job, Role, Store
from .access import Admin, SettingsOf, StoreOf, Submitter, Viewer, sees_all
from .plans import Plans
from .submission import resolve
from .views import node_view, queue_entry

router = APIRouter(tags=["service"])

LEASE = "controller"
_ON_NODES = [JobState.STARTING, JobState.RUNNING, JobState.PAUSING, JobState.STOPPING, JobState.RECOVERING]
_NodeName = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,100}$")]
_UserName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


@router.get("/nodes")
def nodes(user: Viewer, store: StoreOf) -> schemas.NodePage:
    """All nodes that were ever seen."""
    running = store.jobs.list(states=_ON_NODES, user=None if sees_all(user) else user.name, specs=False)
    return schemas.NodePage(nodes=[node_view(node, running) for node in store.nodes.list()])


@router.post("/nodes/{name}/drain")
def drain(name: _NodeName, body: schemas.Draining, user: Admin, store: StoreOf) -> schemas.NodeView:
    """Give a node no new jobs, or take it back into service, which forgets its faults."""
    store.nodes.drain(name, body.drained, body.reason or (f"drained by {user.name}" if body.drained else ""))
    return node_view(store.nodes.get(name), store.jobs.list(states=_ON_NODES))


@router.get("/queue")
def queue(user: Viewer, store: StoreOf) -> schemas.QueueView:
    """Who waits and who runs; of other people's jobs only that they do."""
    jobs = store.jobs.list(states=[JobState.QUEUED, JobState.PAUSED, *_ON_NODES], specs=False)
    waiting = sorted((j for j in jobs if j.state is JobState.QUEUED), key=_turn)
    rest = sorted((j for j in jobs if j.state is not JobState.QUEUED), key=_turn)
    return schemas.QueueView(
        waiting=[queue_entry(job, user) for job in waiting], running=[queue_entry(job, user) for job in rest]
    )


@router.post("/plan")
def plan(
    body: schemas.PlanQuestion, request: Request, user: Submitter, store: StoreOf, settings: SettingsOf
) -> schemas.PlanAnswer:
    """Where a job would fit and how fast it would be, without running it."""
    spec = resolve(body.spec, settings)
    plans: Plans = request.app.state.plans
    return plans.ask(spec.model_dump(mode="json"), store.nodes.list())


@router.get("/users")
def users(user: Admin, store: StoreOf) -> schemas.UserPage:
    """All users."""
    return schemas.UserPage(users=[schemas.UserView(name=u.name, role=u.role.value) for u in store.people.list()])


@router.put("/users/{name}")
def set_user(name: _UserName, body: schemas.UserChange, user: Admin, store: StoreOf) -> schemas.UserView:
    """Add a user, or give one another role."""
    changed = store.people.add(name, Role(body.role), time.time())
    return schemas.UserView(name=changed.name, role=changed.role.value)


@router.post("/users/{name}/token", status_code=201)
def new_token(name: _UserName, user: Admin, store: StoreOf) -> schemas.NewToken:
    """A new token for a user; the ones before are not valid any more."""
    store.people.revoke_tokens(name)
    return schemas.NewToken(user=name, token=store.people.new_token(name, time.time()))


@router.get("/health")
def health(user: Viewer, store: StoreOf) -> schemas.Health:
    """Whether there is somebody who starts and ends jobs."""
    leader = store.leases.holder(LEASE, time.time())
    counts = store.jobs.count(user=None if sees_all(user) else user.name)
    return schemas.Health(
        status="ok" if leader is not None else "degraded",
        version=version("lazytrain"),
        database=_kind(store),
        leader=leader.owner if leader is not None else None,
        nodes=sum(node.alive for node in store.nodes.list()),
        jobs={state.value: count for state, count in counts.items()},
    )


def _kind(store: Store) -> str:
    return store.url.split(":", 1)[0].split("+")[0]


def _turn(job: Job) -> tuple[int, float]:
    return -job.priority, job.queued_at
