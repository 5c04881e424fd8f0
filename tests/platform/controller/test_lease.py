"""A step that takes longer than the lease."""

from typing import Any

import pytest

from lazytrain.platform.store import Stale

World = Any


def slow(world: World) -> Any:
    """Work for one job that takes four seconds."""

    def work(job: Any) -> None:
        world.now += 4.0

    return work


def test_a_long_step_keeps_the_lease(world: World) -> None:
    world.controller.step()
    desk = world.controller._desk
    desk.for_each([world.submit() for _ in range(6)], slow(world))
    assert desk.lease.expires_at > world.now
    assert world.store.leases.take("controller", "another", world.now, 10.0) is None


def test_it_ends_when_somebody_else_leads(world: World) -> None:
    world.controller.step()
    desk = world.controller._desk

    def lose(job: Any) -> None:
        world.now += 20.0
        assert world.store.leases.take("controller", "another", world.now, 10.0) is not None

    with pytest.raises(Stale):
        desk.for_each([world.submit(), world.submit()], lose)
