"""Being the only one, as long as one keeps saying so."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from .database import Database
from .records import Lease
from .tables import LeaseRow


class LeaseStore:
    """Leases in a database. A lease that is not renewed passes to whoever asks first after it ran out."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def take(
        self, name: str, owner: str, now: float, duration_s: float, *, silent: Lease | None = None
    ) -> Lease | None:
        """Take or renew the lease; None while somebody else has it. ``epoch`` grows when it changes hands.

        One that is still as ``silent`` says is nobody's any more, whenever it ends.
        """
        try:
            with self._db.write() as session:
                row = session.scalars(select(LeaseRow).where(LeaseRow.name == name).with_for_update()).one_or_none()
                if row is None:
                    row = LeaseRow(name=name, owner=owner, epoch=1, expires_at=now + duration_s)
                    session.add(row)
                elif row.owner == owner:
                    row.expires_at = now + duration_s
                elif row.expires_at <= now or _lease(row) == silent:
                    row.owner, row.epoch, row.expires_at = owner, row.epoch + 1, now + duration_s
                else:
                    return None
                session.flush()
                return _lease(row)
        except IntegrityError:  # another process made the first one at the same moment
            return None

    def give_back(self, lease: Lease) -> None:
        """Let the next one have it at once."""
        with self._db.write() as session:
            row = session.get(LeaseRow, lease.name)
            if row is not None and (row.owner, row.epoch) == (lease.owner, lease.epoch):
                row.expires_at = 0.0

    def holder(self, name: str, now: float) -> Lease | None:
        """Who has it."""
        with self._db.read() as session:
            row = session.get(LeaseRow, name)
            if row is None or row.expires_at <= now:
                return None
            return _lease(row)


def _lease(row: LeaseRow) -> Lease:
    return Lease(row.name, row.owner, row.epoch, row.expires_at)
