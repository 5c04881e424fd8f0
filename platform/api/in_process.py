"""The API for a client in the same process: without a socket, but through everything that a request passes."""

from __future__ import annotations

import io
import urllib.parse
import urllib.request
from email.message import Message as Headers
from urllib.response import addinfourl

from anyio import from_thread
from starlette.types import ASGIApp, Message


class InProcess(urllib.request.HTTPHandler):
    """Give it to `client.Client` as a handler. Works in worker threads of the event loop that serves the API."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    def http_open(self, request: urllib.request.Request) -> addinfourl:  # type: ignore[override]
        """Answer the request; urllib turns a status of 400 or more into its HTTPError."""
        return from_thread.run(_Exchange(request).run, self._app)


class _Exchange:
    """One request and its answer."""

    def __init__(self, request: urllib.request.Request) -> None:
        self._request = request
        self._body = bytes(request.data) if isinstance(request.data, bytes) else b""
        self._begun, self._status, self._answer, self._headers = False, 500, io.BytesIO(), Headers()

    async def run(self, app: ASGIApp) -> addinfourl:
        try:
            await app(self._scope(), self._receive, self._send)
        except Exception:
            if not self._begun:  # else it was answered with 500 and logged, and is raised again for the server's log
                raise
        self._answer.seek(0)
        found = addinfourl(self._answer, self._headers, self._request.full_url, self._status)
        found.msg = ""  # type: ignore[attr-defined]  # what HTTPErrorProcessor reads as the reason
        return found

    def _scope(self) -> dict[str, object]:
        path, _, query = self._request.selector.partition("?")
        given = {"host": self._request.host, **{k.lower(): v for k, v in self._request.header_items()}}
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self._request.get_method(),
            "scheme": "http",
            "path": urllib.parse.unquote(path),
            "raw_path": path.encode("ascii"),
            "query_string": query.encode("ascii"),
            "root_path": "",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given.items()],
            "client": ("dashboard", 0),
            "server": ("in-process", 0),
        }

    async def _receive(self) -> Message:
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun, self._status = True, message["status"]
            for name, value in message["headers"]:
                self._headers[name.decode("latin-1")] = value.decode("latin-1")
        else:
            self._answer.write(message.get("body", b""))
