"""One request by somebody who is signed in, and how a page function becomes a route.

A page is a plain function from a `Visit` to a `Response`. It runs in a thread, because the client waits for the API.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

import anyio
import anyio.to_thread
from markupsafe import Markup
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from ...jobs.errors import (
    Conflict,
    Forbidden,
    InputError,
    LazytrainError,
    NotFound,
    TooMany,
    Unauthorized,
    Unreachable,
)
from ...platform.artifacts import JOB_ID
from ...platform.client import Client
from ...platform.schemas import UserView
from .reading import FRESH_S, Reads
from .rendering import renderer
from .sessions import Sessions

Answer = TypeVar("Answer")
log = logging.getLogger(__name__)

MOST_FORM_BYTES = 1 << 20
_THREADS = 40
_ROLES = ("viewer", "submitter", "admin")


@dataclass
class State:
    """What all requests share."""

    client_for: Callable[[str], Client]
    """A client of the API for a token."""
    cookie: str = "lazytrain"
    """Name of the cookie: browsers do not keep the ports of one host apart."""
    secure: bool = False
    """Whether browsers reach us over TLS alone."""
    sessions: Sessions = field(default_factory=Sessions)
    reads: Reads = field(default_factory=Reads)

    @cached_property
    def threads(self) -> anyio.CapacityLimiter:
        """Threads for pages, apart from those of the API, for which they wait."""
        return anyio.CapacityLimiter(_THREADS)


@dataclass
class Visit:
    """Who asks for what."""

    request: Request
    state: State
    form: Mapping[str, str]
    token: str = ""

    @cached_property
    def client(self) -> Client:
        """The API, for this user; for changes, and for reads that are not repeated."""
        return self.state.client_for(self.token)

    def read(self, name: str, *arguments: Any, fresh_s: float = FRESH_S, **options: Any) -> Any:
        """What the client's method ``name`` says, at most ``fresh_s`` old."""
        key = (name, *arguments, *sorted(options.items()))
        return self.state.reads.get(self.token, key, lambda: getattr(self.client, name)(*arguments, **options), fresh_s)

    def once(self, key: tuple[Any, ...], ask: Callable[[], Answer], fresh_s: float = FRESH_S) -> Answer:
        """What ``ask`` found, at most ``fresh_s`` old."""
        return self.state.reads.get(self.token, key, ask, fresh_s)

    @cached_property
    def user(self) -> UserView:
        """Who is signed in. Raises Unauthorized when the token is not valid any more."""
        found: UserView = self.read("me", fresh_s=10.0)
        return found

    def may(self, role: str, owner: str | None = None) -> bool:
        """Whether the user's role includes ``role``; with ``owner``, and the thing is theirs or they are an admin."""
        enough = _ROLES.index(self.user.role) >= _ROLES.index(role)
        return enough and (owner is None or owner == self.user.name or self.user.role == "admin")

    def asked(self, name: str, default: str = "") -> str:
        """A word of the query."""
        return self.request.query_params.get(name, default)

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number of the query, within bounds; the default for what is none."""
        text = self.asked(name)
        return min(high, max(low, int(text))) if text.isascii() and text.isdigit() and len(text) < 19 else default

    @property
    def job_id(self) -> str:
        """The job of the address. Raises NotFound for what is no id of a job."""
        found: str = self.request.path_params["job"]
        if not JOB_ID.fullmatch(found):
            raise NotFound("there is no such job", hint="the queue lists the jobs")
        return found

    @property
    def part(self) -> str:
        """The part of the page that is asked for alone; empty for the whole page."""
        return self.asked("part")

    def here(self, **changes: Any) -> str:
        """The address of this page with words of its query changed; None takes one out.

        It is that of the whole page, also where only a part was asked for.
        """
        given = self.request.query_params.multi_items()
        kept = [pair for pair in given if pair[0] not in ("part", *changes)]
        kept += [(name, str(value)) for name, value in changes.items() if value is not None]
        return self.request.url.path + (f"?{urlencode(kept)}" if kept else "")

    def live(self, part: str, seconds: int) -> Markup:
        """Attributes of an element that shows a part of this page and is read anew every so often."""
        return Markup(
            'id="part-{}" hx-get="{}" hx-trigger="every {}s, anew from:body" hx-swap="innerHTML" data-live'
        ).format(part, self.here(part=part), seconds)

    @property
    def by_script(self) -> bool:
        """Whether our own script asks, which takes a part of a page and shows what was done by itself."""
        return self.request.headers.get("hx-request") == "true"

    def show(self, template: str, status: int = 200, **values: Any) -> Response:
        """The page, or the block ``part_NAME`` of it that was asked for. Raises NotFound for a block of no page."""
        context = {
            "visit": self,
            "user": self.user,
            "theme": theme_of(self.request),
            "path": self.request.url.path,
            **values,
        }
        return answer(self.request, template, self.part, status, context)

    def done(self, said: str, back: str, *, leave: bool = False) -> Response:
        """After a change: the script says so and reads the page anew, a plain form goes to ``back``.

        With ``leave`` the script goes there too: what was changed is not on this page any more.
        """
        self.state.reads.forget(self.token)
        if not self.by_script:
            return RedirectResponse(back, status_code=303)
        return Response(status_code=204, headers={"hx-redirect": back} if leave else {"x-said": quote(said)})


def answer(request: Request, template: str, part: str, status: int, context: Mapping[str, Any]) -> Response:
    """A rendered page, or with ``part`` one block of it, which is sent again only if it has changed."""
    found = renderer().get_template(template)
    if not part:
        return HTMLResponse(found.render(**context), status_code=status)
    block = found.blocks.get(f"part_{part}")
    if block is None:
        raise NotFound("this page has no such part")
    html = "".join(block(found.new_context(dict(context))))
    tag = f'"{hashlib.sha256(html.encode()).hexdigest()[:24]}"'
    headers = {"etag": tag, "cache-control": "private, no-cache", "vary": "cookie"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return HTMLResponse(html, status_code=status, headers=headers)


def theme_of(request: Request) -> str:
    """``light``, ``dark``, or empty for what the system is set to."""
    chosen = request.cookies.get("theme", "")
    return chosen if chosen in ("light", "dark") else ""


def page(function: Callable[[Visit], Response]) -> Callable[[Request], Any]:
    """A route for people who are signed in; others are sent to the sign-in page and come back from there."""

    def signed_in(visit: Visit) -> Response:
        session = visit.state.sessions.find(visit.request.cookies.get(visit.state.cookie, ""))
        if session is None:
            return _to_login(visit.request)
        visit.token = session.token
        try:
            return function(visit)
        except Unauthorized:
            visit.state.sessions.end(visit.request.cookies[visit.state.cookie])
            return _to_login(visit.request)

    return open_page(signed_in)


def open_page(function: Callable[[Visit], Response]) -> Callable[[Request], Any]:
    """A route for everybody."""

    async def endpoint(request: Request) -> Response:
        state: State = request.app.state.dashboard
        try:
            form = await _form(request) if request.method == "POST" else {}
        except ClientDisconnect:
            return Response(status_code=400)
        except InputError as error:
            return _failed(Visit(request, state, {}), error)
        visit = Visit(request, state, form)
        return await anyio.to_thread.run_sync(partial(_run, function, visit), limiter=state.threads)

    return endpoint


def _run(function: Callable[[Visit], Response], visit: Visit) -> Response:
    try:
        return function(visit)
    except LazytrainError as error:
        return _failed(visit, error)
    except Exception:  # it is answered here, behind the door, so that the answer has its headers
        log.exception("%s %s failed", visit.request.method, visit.request.url.path)
        return _failed(visit, LazytrainError("this page failed; the log of the service has the trace"), 500)


async def _form(request: Request) -> dict[str, str]:
    """Fields of a form that was sent as browsers do by default; the last of equal names counts."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_FORM_BYTES:
            raise InputError(f"the form is larger than {MOST_FORM_BYTES:,} bytes")
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=1000))


def _to_login(request: Request) -> Response:
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    if request.headers.get("hx-request") == "true":
        return Response(status_code=401, headers={"hx-refresh": "true"})
    to = f"/login?next={quote(here, safe='')}" if request.method == "GET" and here != "/" else "/login"
    return RedirectResponse(to, status_code=303)


def _failed(visit: Visit, error: LazytrainError, status: int = 0) -> Response:
    """What went wrong, in words: in the place of the page, or told to the script, which leaves the page as it is."""
    status = status or _status(error)
    words = f"{error.message} ({error.hint})" if error.hint else error.message
    if visit.by_script:
        return Response(words, status_code=status, media_type="text/plain", headers={"x-said": quote(words)})
    context = {
        "visit": None,
        "user": None,
        "theme": theme_of(visit.request),
        "path": visit.request.url.path,
        "status": status,
        "error": error,
    }
    return answer(visit.request, "failed.html", "", status, context)


def _status(error: LazytrainError) -> int:
    if isinstance(error, Unreachable):
        return 503
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, Forbidden):
        return 403
    if isinstance(error, Conflict):
        return 409
    if isinstance(error, TooMany):
        return 429
    return 422 if isinstance(error, InputError) else 502
