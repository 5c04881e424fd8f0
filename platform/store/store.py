"""The whole store of one installation."""

from __future__ import annotations

from .audit import AuditStore
from .database import Database
from .forecasts import ForecastStore
from .jobs import JobStore
from .leases import LeaseStore
from .nodes import NodeStore
from .people import PeopleStore


class Store:
    """Opens a database and brings its tables up to date; safe to use from several processes and threads."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._database = Database(url)
        self.jobs = JobStore(self._database)
        self.nodes = NodeStore(self._database)
        self.people = PeopleStore(self._database)
        self.leases = LeaseStore(self._database)
        self.forecasts = ForecastStore(self._database)
        self.audit = AuditStore(self._database)

    def close(self) -> None:
        """Give all connections back."""
        self._database.close()
