"""When waiting jobs are expected to run: what placement said last, kept for people who look at the queue."""

from __future__ import annotations

from collections.abc import Mapping

from .database import Database
from .tables import ForecastRow

_ONLY = "queue"
Times = tuple[float | None, float | None]
"""Expected start and end in Unix seconds; None where nobody can say."""


class ForecastStore:
    """One record, replaced as a whole: it changes with every decision, and only the newest counts."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def put(self, expected: Mapping[str, Times], now: float) -> None:
        """Replace what was expected before."""
        content = {job: list(times) for job, times in expected.items()}
        with self._db.write() as session:
            row = session.get(ForecastRow, _ONLY)
            if row is None:
                session.add(ForecastRow(name=_ONLY, at=now, content=content))
            else:
                row.at, row.content = now, content

    def get(self, now: float, *, oldest_s: float = 120.0) -> dict[str, Times]:
        """What is expected of each job; nothing when that was said more than ``oldest_s`` ago."""
        with self._db.read() as session:
            row = session.get(ForecastRow, _ONLY)
            if row is None or now - row.at > oldest_s:
                return {}
            return {job: (times[0], times[1]) for job, times in row.content.items()}
