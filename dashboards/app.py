"""The pages as one application, to be served beside the API or on their own in front of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from ..jobs.errors import NotFound
from ..platform.api import Origins
from ..platform.client import Client
from ..schedulers import drawing
from .pages import compare, job, login, nodes, overview, plan, queue, submit
from .web import Door, State, Visit, page

STATIC = Path(__file__).parent / "static"


def create_app(
    client_for: Callable[[str], Client],
    *,
    origins: Origins | None = None,
    cookie: str = "lazytrain",
    secure: bool = False,
) -> Starlette:
    """All pages. ``client_for`` gives a client of the API for a token; whatever a page shows comes from it.

    ``origins`` are the host names under which browsers reach it, by default the loopback ones; ``secure`` says that
    they do so over TLS.
    """
    chosen = (login, overview, queue, job, nodes, plan, submit, compare)
    routes = [route for each in chosen for route in each.routes]
    app = Starlette(
        routes=[
            *routes,
            *_plot_files(),
            Mount("/static", Files(directory=STATIC)),
            Route("/{path:path}", page(_nothing)),
        ],
        middleware=[Middleware(Door, origins=origins or Origins())],
    )
    app.state.dashboard = State(client_for, cookie=cookie, secure=secure)
    return app


def beside(api: ASGIApp, pages: ASGIApp) -> ASGIApp:
    """One application of both: ``/metrics`` and what begins with ``/api/`` are the API's."""

    async def either(scope: Scope, receive: Receive, send: Send) -> None:
        is_page = scope["type"] == "http" and scope["path"] != "/metrics" and not scope["path"].startswith("/api/")
        await (pages if is_page else api)(scope, receive, send)

    return either


class Files(StaticFiles):
    """Our own files, which browsers may keep for as long as they have not changed."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        return response


def _plot_files() -> list[Route]:
    """Style and script of the plots, which lie where all plots are drawn."""

    def file(text: str, kind: str) -> Callable[[Request], Response]:
        return lambda request: Response(text, media_type=kind, headers={"cache-control": "no-cache"})

    return [
        Route("/static/plots.css", file(drawing.STYLE, "text/css")),
        Route("/static/plots.js", file(drawing.SCRIPT, "text/javascript")),
    ]


def _nothing(visit: Visit) -> Response:
    raise NotFound(f"there is no page {visit.request.url.path}")
