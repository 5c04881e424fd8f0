"""What every request passes before any route sees it: address, origin, kind, size, token, rate; and the audit log."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio.to_thread
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...jobs.errors import LazytrainError
from ..settings import Settings
from ..store import AuditEntry, Store, User
from .origins import READS, Origins
from .problems import answer, answer_to

log = logging.getLogger(__name__)

MOST_BODY_BYTES = 1 << 20
_HEADERS = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}
_BAD_TOKENS_PER_MINUTE = 30


@dataclass
class Buckets:
    """At most so many requests a minute for each key, a third of them at once."""

    per_minute: int
    clock: Callable[[], float] = time.monotonic
    _level: dict[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, key: str) -> bool:
        """Whether one more is allowed now."""
        now, most = self.clock(), max(1.0, self.per_minute / 3)
        level, at = self._level.get(key, (most, now))
        level = min(most, level + (now - at) * self.per_minute / 60)
        self._level[key] = (level - 1 if level >= 1 else level, now)
        if len(self._level) > 10_000:
            self._level = dict(list(self._level.items())[5_000:])
        return level >= 1


class Guard:
    """ASGI middleware; the user it finds is in ``scope["state"]["user"]``."""

    def __init__(self, app: ASGIApp, store: Store, settings: Settings) -> None:
        self._app = app
        self._store = store
        self._origins = Origins.of(settings)
        self._users = Buckets(settings.requests_per_minute)
        self._strangers = Buckets(_BAD_TOKENS_PER_MINUTE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        await _Passage(self, scope, receive, send).go()


@dataclass
class _Passage:
    """One request on its way through the guard."""

    guard: Guard
    scope: Scope
    receive: Receive
    send: Send
    status: int = 0
    user: User | None = None

    async def go(self) -> None:
        changes = self.scope["method"] not in READS
        refusal = self._from_where() or (self._kind_of_body() if changes else None) or await self._who()
        if refusal is None and changes:
            refusal = await self._read_body()
            if self.status == -1:  # the client is gone: nothing was asked for
                return
        if refusal is None:
            await self.guard._app(self.scope, self.receive, self._send)
        else:
            await refusal(self.scope, self.receive, self._send)
        if changes and (self.user is not None or self._counts()):
            await anyio.to_thread.run_sync(self._write_down)

    def _counts(self) -> bool:
        """Whether a stranger's request is written down: whoever has no token must not fill the disk."""
        return self.status == 401 or (self.status != 429 and self.guard._strangers.take(_remote(self.scope)))

    @property
    def _headers(self) -> Headers:
        return Headers(scope=self.scope)

    def _from_where(self) -> Response | None:
        refusal = self.guard._origins.refusal(self._headers, self.scope["method"])
        return None if refusal is None else answer(refusal.status, refusal.code, refusal.message, refusal.hint)

    def _kind_of_body(self) -> Response | None:
        kind = self._headers.get("content-type")
        if kind is None and self.scope["method"] == "DELETE":
            return None
        if kind is None or kind.split(";")[0].strip().lower() != "application/json":
            return answer(415, "not_json", "the body must be JSON", "send Content-Type: application/json")
        return None

    async def _who(self) -> Response | None:
        remote = _remote(self.scope)
        scheme, _, token = self._headers.get("authorization", "").partition(" ")
        try:
            if scheme.lower() == "bearer" and token:
                self.user = await anyio.to_thread.run_sync(self.guard._store.people.who, token.strip())
        except LazytrainError as error:
            return answer_to(error)
        if self.user is None:
            if not self.guard._strangers.take(remote):
                return answer(429, "too_many", "too many requests without a valid token")
            return answer(
                401,
                "unauthorized",
                "a valid token is needed",
                "send Authorization: Bearer TOKEN; lazytrain's own commands take it from LAZYTRAIN_HOME/token",
            )
        if not self.guard._users.take(self.user.name):
            return answer(429, "too_many", "too many requests", "wait a few seconds")
        self.scope.setdefault("state", {})["user"] = self.user
        return None

    async def _read_body(self) -> Response | None:
        """All of the body, before anything is done: who leaves in the middle has asked for nothing."""
        body, more = b"", True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                self.status = -1
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MOST_BODY_BYTES:
                return answer(413, "too_large", f"the body is larger than {MOST_BODY_BYTES:,} bytes")
        self.receive = _replay(body, self.receive)
        return None

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            known = {name.lower() for name, _ in message["headers"]}
            extra = [(k.encode(), v.encode()) for k, v in _HEADERS.items() if k.encode() not in known]
            message = {**message, "headers": [*message["headers"], *extra]}
        await self.send(message)

    def _write_down(self) -> None:
        name = self.user.name if self.user else ""
        path = re.sub(r"[^\x20-\x7e]", "?", self.scope["path"])
        entry = AuditEntry(time.time(), name, _remote(self.scope), self.scope["method"], path, self.status)
        try:
            self.guard._store.audit.add(entry)
        except LazytrainError as error:  # the database is down, which the answer has said
            log.warning("not written down: %s: %s", entry, error)


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _remote(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""
