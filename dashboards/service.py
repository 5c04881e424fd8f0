"""The process that serves API and pages on one port.

python -m lazytrain.dashboards.service
"""

from __future__ import annotations

from ..platform.api import InProcess, Origins
from ..platform.api.service import Application, serve
from ..platform.client import Client
from ..platform.settings import Settings
from .app import beside, create_app


def main() -> None:
    """Serve until told to end."""
    serve(with_pages)


def with_pages(api: Application, settings: Settings) -> Application:
    """The API with the pages beside it, which ask it in this process."""
    local = InProcess(api)

    def client_for(token: str) -> Client:
        return Client("http://127.0.0.1", token, handlers=[local])

    secure = bool(settings.tls_cert or settings.api_names)
    pages = create_app(client_for, origins=Origins.of(settings), cookie=f"lazytrain_{settings.api_port}", secure=secure)
    return beside(api, pages)


if __name__ == "__main__":
    main()
