"""Databases of earlier versions, with rows in every table, brought up to date; and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

import lazytrain.platform.store.database as database_module
from lazytrain.platform.store import Store

MIGRATIONS = Path(database_module.__file__).parent / "migrations"
SCRIPTS = ScriptDirectory(str(MIGRATIONS))
REVISIONS = [script.revision for script in SCRIPTS.walk_revisions()][::-1]


def engine(url: str) -> sa.Engine:
    return sa.create_engine(sa.make_url(url.replace("postgresql:", "postgresql+psycopg:")))


def migrate(url: str, revision: str) -> None:
    """Bring the database to a revision, forwards or backwards."""
    made = engine(url)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with made.begin() as connection:
        config.attributes["connection"] = connection
        before = sa.inspect(connection).has_table("alembic_version") and connection.scalar(
            sa.text("SELECT version_num FROM alembic_version")
        )
        go_back = revision == "base" or (before and REVISIONS.index(before) > REVISIONS.index(revision))
        (command.downgrade if go_back else command.upgrade)(config, revision)
    made.dispose()


def some(column: sa.Column[Any], number: int) -> Any:
    """A value for a column; rows of one number refer to each other."""
    kind = column.type
    if isinstance(kind, sa.Boolean):
        return bool(number % 2)
    if isinstance(kind, sa.JSON):
        return {"number": number, "words": ["a", "ä"]}
    if isinstance(kind, sa.Float):
        return number + 0.25
    if isinstance(kind, sa.Integer):
        return number
    return f"w{number}"[: getattr(kind, "length", None) or 10]


def fill(url: str) -> dict[str, list[dict[str, Any]]]:
    """Two rows for every table that there is, and what they hold."""
    made = engine(url)
    tables = sa.MetaData()
    tables.reflect(made)
    written: dict[str, list[dict[str, Any]]] = {}
    with made.begin() as connection:
        for table in tables.sorted_tables:
            if table.name != "alembic_version":
                rows = [{column.name: some(column, number) for column in table.columns} for number in (1, 2)]
                connection.execute(sa.insert(table), rows)
                written[table.name] = rows
    made.dispose()
    return written


def held(url: str, table: str, columns: list[str]) -> list[dict[str, Any]]:
    made = engine(url)
    found = sa.Table(table, sa.MetaData(), autoload_with=made)
    kept = [found.c[name] for name in columns if name in found.c]
    with made.connect() as connection:
        rows = [dict(row._mapping) for row in connection.execute(sa.select(*kept).order_by(kept[0]))]
    made.dispose()
    return rows


def assert_kept(url: str, written: dict[str, list[dict[str, Any]]]) -> None:
    for table, rows in written.items():
        found = held(url, table, list(rows[0]))
        assert found, table
        assert found == [{name: row[name] for name in found[0]} for row in rows], table


@pytest.mark.parametrize("revision", REVISIONS)
def test_rows_of_an_earlier_version_are_there_after_the_upgrade(url: str, revision: str) -> None:
    migrate(url, revision)
    written = fill(url)
    assert {"jobs", "events", "users", "tokens", "nodes", "requests"} <= set(written)
    Store(url).close()  # what the service does when it starts
    assert_kept(url, written)


def test_every_step_can_be_taken_back(url: str) -> None:
    migrate(url, REVISIONS[-1])
    written = fill(url)
    for before, after in zip(REVISIONS[-2::-1], REVISIONS[:0:-1], strict=True):
        migrate(url, before)
        migrate(url, after)
        migrate(url, before)
    common = {table: rows for table, rows in written.items() if engine_has(url, table)}
    assert held(url, "tokens", ["digest"]) == []  # they were revoked, which an earlier version cannot know
    assert_kept(url, {table: rows for table, rows in common.items() if table != "tokens"})
    migrate(url, "base")
    assert not engine_has(url, "jobs")
    migrate(url, REVISIONS[-1])
    fill(url)


def engine_has(url: str, table: str) -> bool:
    made = engine(url)
    there = sa.inspect(made).has_table(table)
    made.dispose()
    return there


def test_revisions_are_one_line() -> None:
    assert SCRIPTS.get_heads() == [REVISIONS[-1]]
    assert [SCRIPTS.get_revision(name).down_revision for name in REVISIONS] == [None, *REVISIONS[:-1]]
