"""ASGI middleware of the pages: by our own names only, changes from our own pages only, and no foreign script."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...platform.api import READS, Origins

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    # A form posted under no-referrer would name "null" as its origin.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Door:
    """Stands before all pages; the session is not looked at here."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def outside(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in {**_HEADERS, "cache-control": "no-store"}.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, outside)

    def _refusal(self, scope: Scope) -> Response | None:
        headers, method = Headers(scope=scope), scope["method"]
        found = self._origins.refusal(headers, method)
        if found is not None:
            return PlainTextResponse(f"{found.message}\n", status_code=found.status)
        # The cookie travels by itself, so a change has to say where it comes from; every browser does.
        if method not in READS and "origin" not in headers:
            return PlainTextResponse("the request does not say which page it comes from\n", status_code=403)
        return None
