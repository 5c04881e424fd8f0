"""Addresses at which there is no Ray."""

import socket

import pytest

from lazytrain.jobs.errors import Unreachable
from lazytrain.platform.cluster.local import Connection
from lazytrain.platform.settings import Settings


def test_where_nothing_listens_is_said_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match=f"no Ray answers at 127.0.0.1:{port}: .*refused"):
        Connection(Settings(ray_auth="disabled"), f"127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["auto", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999999", ""])
def test_what_is_no_address_is_said_at_once(address: str) -> None:
    with pytest.raises(Unreachable, match="no Ray answers at") as caught:
        Connection(Settings(ray_auth="disabled"), address)
    assert "HOST:PORT" in caught.value.hint
