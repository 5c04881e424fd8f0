"""From where a browser may reach us: by our own names only, and with changes from our own pages only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers

from ..settings import Settings

READS = ("GET", "HEAD")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Refusal:
    """Why a request goes no further: an HTTP status, and words for programs and for people."""

    status: int
    code: str
    message: str
    hint: str = ""


class Origins:
    """Host names under which the service is reached."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {*_LOOPBACK, *(name.lower() for name in names)}

    @classmethod
    def of(cls, settings: Settings) -> Origins:
        """Those of this installation."""
        return cls((settings.api_host, *settings.api_names))

    def refusal(self, headers: Headers, method: str) -> Refusal | None:
        """A page of somebody else's must not reach us through a browser, nor by a name of its own for our address."""
        host = headers.get("host", "")
        if _host_name(host) not in self._names:
            return Refusal(
                403, "bad_host", "the request names another host", "reach the API by the address it listens on"
            )
        origin = headers.get("origin")
        if origin is not None and method not in READS:
            scheme, _, name = origin.lower().partition("://")
            if scheme not in ("http", "https") or name != host.lower():
                return Refusal(403, "bad_origin", "the request comes from a page of another site")
        return None


def _host_name(host: str) -> str:
    """The host without its port."""
    return re.sub(r":\d+$", "", host).lower()
