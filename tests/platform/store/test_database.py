"""Opening a database: its tables, what it refuses, two processes at once."""

import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.exc import InterfaceError
from sqlalchemy.exc import TimeoutError as NoConnection

from lazytrain.jobs.errors import InputError, Unreachable
from lazytrain.platform.store.database import Database
from lazytrain.platform.store.tables import Table


def test_the_migrations_make_exactly_the_tables_of_the_models(url: str) -> None:
    database = Database(url)
    with database._engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Table.metadata) == []


def test_processes_that_open_a_new_database_at_once_all_succeed(url: str) -> None:
    script = "import sys; from lazytrain.platform.store import Store; Store(sys.argv[1]).jobs.list()"
    started = [subprocess.Popen([sys.executable, "-c", script, url], stderr=subprocess.PIPE) for _ in range(4)]
    for process in started:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()


@pytest.mark.parametrize("bad", ["nonsense", "mysql://host/name", "sqlite://", "sqlite:///:memory:"])
def test_another_kind_of_database_is_refused(bad: str) -> None:
    with pytest.raises(InputError) as caught:
        Database(bad)
    assert "sqlite" in caught.value.hint


def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(Unreachable) as caught:
        Database("postgresql://ada:secret@127.0.0.1:1/lazytrain")
    assert "127.0.0.1:1" in caught.value.message
    assert "secret" not in str(caught.value)


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    Database(f"sqlite:///{tmp_path / 'a' / 'store.db'}")
    assert (tmp_path / "a" / "store.db").stat().st_mode & 0o777 == 0o600


def test_no_connection_in_time_is_a_server_that_does_not_answer(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    with pytest.raises(Unreachable, match="QueuePool limit"), database.read():
        raise NoConnection("QueuePool limit of size 10 overflow 10 reached")
    with pytest.raises(Unreachable, match="the connection is closed"), database.write():
        raise InterfaceError("SELECT 1", {}, Exception("the connection is closed"))
