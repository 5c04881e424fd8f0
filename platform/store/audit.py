"""Who asked for which change, and how it was answered; only ever added to."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from .database import Database
from .records import AuditEntry
from .tables import AuditRow


class AuditStore:
    """The audit log in a database. It never holds bodies or tokens."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, entry: AuditEntry) -> None:
        """Append."""
        with self._db.write() as session:
            session.add(AuditRow(**{**vars(entry), "path": entry.path[:300]}))

    def list(self, limit: int = 1000) -> Sequence[AuditEntry]:
        """The newest entries, newest first."""
        with self._db.read() as session:
            rows = session.scalars(select(AuditRow).order_by(AuditRow.id.desc()).limit(limit))
            return [AuditEntry(row.time, row.user, row.remote, row.method, row.path, row.status) for row in rows]
