"""The only writer of job states: one step loads, works and applies; a loop calls it, and so can a test."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...jobs.errors import LazytrainError
from ..admission import Planner
from ..cluster.runs import Runner
from ..store import Lease, Stale, Store
from .admission import admit
from .desk import Desk
from .nodes import look_at_nodes
from .place import place
from .ports import Clock, Config, Decide
from .requests import do_requests
from .watch import watch

log = logging.getLogger(__name__)

LEASE = "controller"
_RENEW_BELOW = 0.7
"""Part of the lease's time that is left when it is renewed."""
_PARTS: tuple[Callable[[Desk], None], ...] = (look_at_nodes, watch, do_requests, admit, place)


class Controller:
    """Runs jobs as long as it holds the lease; a second one waits until the first is silent.

    Nothing that it knows is lost with it: the store says what should be, the machines say what is.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        runner: Runner,
        planner: Planner,
        decide: Decide,
        config: Config,
        clock: Clock,
        steady: Clock | None = None,
    ) -> None:
        """``steady`` measures how long something takes, by default ``clock``; nobody must set it."""
        self.name = name
        self._store = store
        self._config = config
        self._clock = clock
        self._steady = steady or clock
        self._desk: Desk | None = None
        self._renewed_at = float("-inf")
        self._other: tuple[Lease, float] | None = None
        """The lease of another controller, and since when it has been as it is."""
        self._make_desk: Callable[[Lease], Desk] = lambda lease: Desk(
            store, runner, planner, decide, config, clock, self._steady, lease
        )

    @property
    def leads(self) -> bool:
        """Whether it held the lease in its last step."""
        return self._desk is not None

    def step(self) -> bool:
        """Bring every job a little nearer to what it should be; False when another controller leads.

        A part that fails (machines or database that do not answer) is logged and tried again in the next step; the
        parts after it have their turn.
        """
        desk = self._lead()
        if desk is None:
            return False
        for part in _PARTS:
            try:
                part(desk)
            except Stale:
                log.info("the lease is lost or a job has changed; %s goes on in the next step", part.__name__)
            except LazytrainError as error:
                log.warning("%s: %s", part.__name__, error)
            except Exception:  # the parts after it, and the next step, may still do some good
                log.exception("%s failed", part.__name__)
        return True

    def resign(self) -> None:
        """Let another controller lead at once."""
        if self._desk is not None:
            self._store.leases.give_back(self._desk.lease)
            self._desk = None

    def _lead(self) -> Desk | None:
        left_s = self._desk.lease.expires_at - self._clock() if self._desk is not None else 0.0
        fresh = self._steady() - self._renewed_at < (1.0 - _RENEW_BELOW) * self._config.lease_s
        if fresh and left_s > _RENEW_BELOW * self._config.lease_s:
            return self._desk  # every write checks that it is so
        now, at = self._clock(), self._steady()
        lease = self._store.leases.take(LEASE, self.name, now, self._config.lease_s, silent=self._silent())
        self._renewed_at = at
        if lease is None:
            self._desk = None
        elif self._desk is None or self._desk.lease.epoch != lease.epoch:
            log.info("%s leads, epoch %d", self.name, lease.epoch)
            self._desk = self._make_desk(lease)
        else:
            self._desk.lease = lease
        return self._desk

    def _silent(self) -> Lease | None:
        """The lease of another controller that has not renewed it for its whole time: what it says of its end was said
        by a clock that has been set back since."""
        found = self._store.leases.holder(LEASE, 0.0)
        if found is None or found.owner == self.name:
            self._other = None
            return None
        if self._other is None or self._other[0] != found:
            self._other = found, self._steady()
        return found if self._steady() - self._other[1] > self._config.lease_s else None
