"""The API's process, for whatever else is served beside it on its port.

python -m lazytrain.platform.api.service        the API alone
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import TypeAlias

import uvicorn
from starlette.types import ASGIApp

from ...jobs.errors import InputError
from ..admission import PlannerProcess
from ..settings import Settings
from ..store import Store
from .application import create_app
from .first_user import first_user

Application: TypeAlias = ASGIApp


def serve(with_pages: Callable[[Application, Settings], Application] = lambda api, settings: api) -> None:
    """Serve until told to end. ``with_pages`` may put pages beside the API: what does not begin with ``/api/``."""
    settings = Settings.read()
    check_address(settings)
    store = Store(settings.database_url)
    first_user(store, settings)
    planner = PlannerProcess(settings.log_dir / "api-planner.log")
    try:
        uvicorn.run(
            with_pages(create_app(store, settings, planner), settings),
            host=settings.api_host,
            port=settings.api_port,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            timeout_graceful_shutdown=5,
        )
    finally:
        planner.close()
        store.close()


def check_address(settings: Settings) -> None:
    """Raise InputError for an address that others reach, unless there is TLS or a stated proxy in front of it."""
    protected = settings.api_names or (settings.tls_cert and settings.tls_key)
    if _is_loopback(settings.api_host) or protected:
        return
    raise InputError(
        f"the API would listen on {settings.api_host} without TLS: tokens could be read on the way",
        hint="give LAZYTRAIN_TLS_CERT and LAZYTRAIN_TLS_KEY, or name the reverse proxy in front (LAZYTRAIN_API_NAMES)",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    serve()
