"""Routes of the service as a whole: nodes, queue, planning, users, health."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Path, Request

from ...jobs.lifecycle import JobState
from ...schedulers.hardware import same_gpu
from .. import schemas
from ..store import Job, Role, Store
from .access import Admin, SettingsOf, StoreOf, Submitter, Viewer, sees_all
from .plans import Plans
from .submission import check_model, resolve
from .views import ON_NODES, node_views, queue_entry

router = APIRouter(tags=["service"])

LEASE = "controller"
_NodeName = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,100}$")]
_UserName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


@router.get("/nodes")
def nodes(user: Viewer, store: StoreOf) -> schemas.NodePage:
    """All nodes that were ever seen."""
    return schemas.NodePage(nodes=node_views(store, store.nodes.list(), user))


@router.post("/nodes/{name}/drain")
def drain(name: _NodeName, body: schemas.Draining, user: Admin, store: StoreOf) -> schemas.NodeView:
    """Give a node no new jobs, or take it back into service, which forgets its faults."""
    store.nodes.drain(name, body.drained, body.reason or (f"drained by {user.name}" if body.drained else ""))
    (view,) = node_views(store, [store.nodes.get(name)], user)
    return view


@router.get("/queue")
def queue(user: Viewer, store: StoreOf) -> schemas.QueueView:
    """Who waits and who runs; of other people's jobs only that they do."""
    jobs = store.jobs.list(states=[JobState.QUEUED, JobState.PAUSED, *ON_NODES], specs=False)
    expected = store.forecasts.get(time.time())
    waiting = sorted((j for j in jobs if j.state is JobState.QUEUED), key=_turn)
    rest = sorted((j for j in jobs if j.state is not JobState.QUEUED), key=_turn)
    return schemas.QueueView(
        waiting=[queue_entry(job, user, expected) for job in waiting],
        running=[queue_entry(job, user, {}) for job in rest],
    )


@router.post("/plan")
def plan(
    body: schemas.PlanQuestion, request: Request, user: Submitter, store: StoreOf, settings: SettingsOf
) -> schemas.PlanAnswer:
    """Where a job would fit and how fast it would be, without running it."""
    spec = resolve(body.spec, settings)
    plans: Plans = request.app.state.plans
    return plans.ask(spec.model_dump(mode="json"), store.nodes.list())


@router.post("/plan/shape")
def plan_shape(
    body: schemas.ShapeQuestion, request: Request, user: Submitter, store: StoreOf, settings: SettingsOf
) -> schemas.ShapeAnswer:
    """The plan of a model at a batch on a kind of node, or on a GPU that is not here; nothing is submitted."""
    check_model(body.model, settings)
    asked = body.model_dump(mode="json")
    measured = next((n for n in store.nodes.list() if n.profile and same_gpu(n.kind, body.gpu)), None)
    plans: Plans = request.app.state.plans
    found = plans.question("shape", {**asked, "profile": dict(measured.profile) if measured else None})
    plan = {name: found[name] for name in found if name not in ("model", "machine", "timeline")}
    return schemas.ShapeAnswer(
        feasible=found["feasible"],
        plan=plan,
        model=found["model"],
        machine=found["machine"],
        timeline=found["timeline"],
    )


@router.post("/nodes/{name}/profile", status_code=202)
def measure_again(name: _NodeName, user: Admin, store: StoreOf) -> schemas.NodeView:
    """Forget what was measured on a node: it is measured anew as soon as nothing runs there."""
    store.nodes.set_profile(name, {})
    (view,) = node_views(store, [store.nodes.get(name)], user)
    return view


@router.get("/me")
def me(user: Viewer) -> schemas.UserView:
    """Whose token this is, and what they may do."""
    return schemas.UserView(name=user.name, role=user.role.value)


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
    now = time.time()
    store.people.revoke_tokens(name, now)
    return schemas.NewToken(user=name, token=store.people.new_token(name, now))


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
