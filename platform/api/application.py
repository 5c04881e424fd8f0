"""The application: its routes behind the guard."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware

from .. import schemas
from ..admission import Planner
from ..settings import Settings
from ..store import Store
from . import files, jobs, problems, prometheus, service_routes
from .guard import Guard
from .plans import Plans
from .series import SeriesReader

PREFIX = "/api/v1"
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorAnswer} for status in (400, 401, 403, 404, 409, 413, 415, 422, 429, 500, 503)
}


def create_app(store: Store, settings: Settings, planner: Planner) -> FastAPI:
    """The API on a store. It never changes a job's state: it adds jobs and files requests for the controller."""
    app = FastAPI(
        title="lazytrain",
        version=version("lazytrain"),
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        middleware=[Middleware(Guard, store=store, settings=settings)],
        responses=_ERRORS,
    )
    app.state.store, app.state.settings = store, settings
    app.state.series = SeriesReader()
    app.state.plans = Plans(planner, str(settings.home / "rows"))
    problems.install(app)
    for router in (jobs.router, files.router, service_routes.router):
        app.include_router(router, prefix=PREFIX)
    app.include_router(prometheus.router)
    return app
