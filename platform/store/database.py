"""A database: its transactions, and the one place that knows SQLite from PostgreSQL."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection
from sqlalchemy.orm import Session

from ...jobs.errors import InputError, Unreachable

_BUSY_MS = 20_000
_PATIENCE = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""Of a PostgreSQL client, in seconds, the last in milliseconds: a server that vanished must not be waited for."""
_MIGRATING = 0x6C7A7472
"""Number of the lock that a PostgreSQL server holds for us during a migration."""


class Database:
    """Opens what the URL names and brings its tables up to date.

    ``sqlite:///PATH`` or ``postgresql://...``. Raises InputError for another URL or a missing driver, Unreachable when
    the server does not answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._engine = _open(url)
        self._writer = self._engine.execution_options(writes=True)
        with _reachable(url):
            self._upgrade()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A short transaction that changes nothing."""
        with _reachable(self.url), Session(self._engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A short transaction, committed at the end of the block unless it raises. Do no slow work in it."""
        with _reachable(self.url), Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        """Give all connections back."""
        self._engine.dispose()

    def _upgrade(self) -> None:
        with self._writer.begin() as connection:
            if self._engine.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATING})"))
            config = Config()
            config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def _open(url: str) -> Engine:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise InputError(f"{url!r} is no database URL", hint="sqlite:///PATH or postgresql://HOST/NAME") from error
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(url, parsed.database)
    if parsed.get_backend_name() != "postgresql":
        raise InputError(
            f"databases of kind {parsed.get_backend_name()} are not supported",
            hint="use sqlite:///PATH or postgresql://HOST/NAME",
        )
    if importlib.util.find_spec("psycopg") is None:
        raise InputError("PostgreSQL needs the package psycopg", hint='pip install "lazytrain[server]"')
    patience = {name: value for name, value in _PATIENCE.items() if name not in parsed.query}
    server = parsed.set(drivername="postgresql+psycopg")
    return create_engine(server, pool_pre_ping=True, pool_size=10, connect_args=patience)


def _sqlite(url: str, path: str | None) -> Engine:
    if not path or path == ":memory:":
        raise InputError("the database must be a file: several processes use it", hint="sqlite:////absolute/path.db")
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    engine = create_engine(url, connect_args={"timeout": _BUSY_MS / 1000, "check_same_thread": False})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, record: Any) -> None:
    # The driver begins transactions at times of its own unless told not to; `_begin_sqlite` does it instead.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={_BUSY_MS}"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    """A transaction that will write takes the lock at once: to ask for it after reading can end in a deadlock."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def _reachable(url: str) -> Iterator[None]:
    try:
        yield
    except (OperationalError, InterfaceError, NoConnection) as error:
        shown = make_url(url).render_as_string(hide_password=True)
        said = str(getattr(error, "orig", error)).splitlines()
        raise Unreachable(
            f"the database {shown} does not answer: {said[0] if said else type(error).__name__}",
            hint="see whether it runs and whether its disk is full",
        ) from error
