"""Where the API may listen, and the token of whoever starts it."""

from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import InputError
from lazytrain.platform.api import first_user
from lazytrain.platform.api.service import check_address
from lazytrain.platform.settings import Settings
from lazytrain.platform.store import Role, Store


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_nothing(host: str) -> None:
    check_address(Settings(api_host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gpu.example.org"])
def test_anywhere_else_needs_tls_or_a_named_proxy(host: str) -> None:
    with pytest.raises(InputError, match="without TLS"):
        check_address(Settings(api_host=host))
    check_address(Settings(api_host=host, api_names=("gpu.example.org",)))
    check_address(Settings(api_host=host, tls_cert=Path("c.pem"), tls_key=Path("k.pem")))
    with pytest.raises(InputError):
        check_address(Settings(api_host=host, tls_cert=Path("c.pem")))


def test_the_first_token_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    name = first_user(store, settings).name
    token = settings.api_token_path.read_text()
    assert settings.api_token_path.stat().st_mode & 0o777 == 0o600
    found: Any = store.people.who(token)
    assert (found.name, found.role) == (name, Role.ADMIN)
    first_user(store, settings)
    assert settings.api_token_path.read_text() == token
    settings.api_token_path.chmod(0o644)
    with pytest.raises(InputError, match="others may read"):
        first_user(store, settings)


def test_a_first_token_that_was_replaced_does_not_come_back(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    name = first_user(store, settings).name
    leaked = settings.api_token_path.read_text()
    store.people.revoke_tokens(name, 1.0)
    first_user(store, settings)  # the service starts again
    assert store.people.who(leaked) is None
    settings.api_token_path.unlink()  # what the hint says
    first_user(store, settings)
    found: Any = store.people.who(settings.api_token_path.read_text())
    assert found.name == name
