"""Every store test runs on SQLite and on a PostgreSQL server that is started once, in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from lazytrain.platform.store import Lease, NewJob, Role, Store


def _as_postgres() -> list[str]:
    """PostgreSQL refuses to run as root."""
    return ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the server, without a database."""
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        pytest.skip("no PostgreSQL on this machine")
    folder = Path(subprocess.check_output([*_as_postgres(), "mktemp", "-d"], text=True).strip())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = str(folder / "data")
    subprocess.run([*_as_postgres(), "initdb", "-D", data, "-A", "trust", "-N"], check=True, capture_output=True)
    options = ["-p", str(port), "-k", str(folder), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
    server = subprocess.Popen(
        [*_as_postgres(), "postgres", "-D", data, *options], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert server.stderr is not None
    for line in server.stderr:
        if "ready to accept connections" in line:
            break
    name = "postgres" if os.geteuid() == 0 else os.environ["USER"]
    try:
        yield f"postgresql://{name}@127.0.0.1:{port}"
    finally:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may have ended by itself
            os.kill(int((folder / "data" / "postmaster.pid").read_text().splitlines()[0]), signal.SIGINT)
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    server: str = request.getfixturevalue("postgres_server")
    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"{server}/{name}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = Store(url)
    opened.people.add("ada", Role.SUBMITTER, 0.0)
    yield opened
    opened.close()


@pytest.fixture
def lease(store: Store) -> Lease:
    taken = store.leases.take("controller", "me", 0.0, 1e12)
    assert taken is not None
    return taken


@pytest.fixture
def new_job() -> Callable[..., NewJob]:
    """A job to submit."""

    def make(**changes: object) -> NewJob:
        fields = {
            "id": f"j-{uuid.uuid4().hex[:10]}",
            "user": "ada",
            "name": "tiny",
            "spec": {"name": "tiny"},
            "run_dir": "/runs/x",
            "priority": 50,
        }
        return NewJob(**{**fields, **changes})  # type: ignore[arg-type]

    return make
