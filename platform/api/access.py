"""Who asks, what they may do, and which jobs they may see."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Request

from ...jobs.errors import Forbidden, NotFound
from ..settings import Settings
from ..store import Job, Role, Store, User


def service_store(request: Request) -> Store:
    """The store of the application."""
    store: Store = request.app.state.store
    return store


def service_settings(request: Request) -> Settings:
    """The settings of the application."""
    settings: Settings = request.app.state.settings
    return settings


def viewer(request: Request) -> User:
    """Whoever has a token (see `guard`)."""
    user: User = request.state.user
    return user


def submitter(user: Annotated[User, Depends(viewer)]) -> User:
    """Somebody who may have jobs. Raises Forbidden."""
    return _at_least(user, Role.SUBMITTER)


def admin(user: Annotated[User, Depends(viewer)]) -> User:
    """Somebody who may do everything. Raises Forbidden."""
    return _at_least(user, Role.ADMIN)


def _at_least(user: User, role: Role) -> User:
    if not user.role.includes(role):
        raise Forbidden(f"{user.name} is a {user.role.value}; this needs the role {role.value}")
    return user


def sees_all(user: User) -> bool:
    """Submitters see their own jobs; viewers, who have none, and admins see everybody's."""
    return user.role is not Role.SUBMITTER


def visible_job(
    job_id: Annotated[str, Path(pattern=r"^j-[0-9a-f]{10}$")],
    user: Annotated[User, Depends(viewer)],
    store: Annotated[Store, Depends(service_store)],
) -> Job:
    """The job of the address. Raises NotFound, also for a job of somebody else's."""
    job = store.jobs.get(job_id)
    if job.removed_at is not None or (job.user != user.name and not sees_all(user)):
        raise NotFound(f"there is no job {job_id}", hint="lazytrain ps lists the jobs")
    return job


def own_job(job: Annotated[Job, Depends(visible_job)], user: Annotated[User, Depends(submitter)]) -> Job:
    """The job of the address, if the user may change it. Raises Forbidden, NotFound."""
    if job.user != user.name and user.role is not Role.ADMIN:
        raise Forbidden(f"job {job.id} belongs to somebody else")
    return job


StoreOf = Annotated[Store, Depends(service_store)]
SettingsOf = Annotated[Settings, Depends(service_settings)]
Viewer = Annotated[User, Depends(viewer)]
Submitter = Annotated[User, Depends(submitter)]
Admin = Annotated[User, Depends(admin)]
VisibleJob = Annotated[Job, Depends(visible_job)]
OwnJob = Annotated[Job, Depends(own_job)]
