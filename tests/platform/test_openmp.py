"""Threads that wait sleep, unless somebody has said otherwise, wherever a training can be started from."""

import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest

from lazytrain.platform.cli.app import run
from lazytrain.platform.cluster.local import _variables
from lazytrain.platform.cluster.run_host import RunHost
from lazytrain.platform.openmp import POLICY, asleep
from lazytrain.platform.settings import Settings


def of_the_command_line() -> Mapping[str, str | None]:
    assert run(["--version"]) == 0
    return os.environ


def of_a_ray() -> Mapping[str, str | None]:
    return _variables(Settings(ray_auth="disabled"), cpus=1)


def of_a_run() -> Mapping[str, str | None]:
    order = SimpleNamespace(cpus=1, device={"kind": "cpu"})
    host = SimpleNamespace(_order=order, _visible=dict)
    return RunHost._environment(host)  # type: ignore[arg-type]


@pytest.mark.parametrize("environment", [of_the_command_line, of_a_ray, of_a_run])
@pytest.mark.parametrize(("before", "after"), [(None, "PASSIVE"), ("active", "active")])
def test_threads_wait_asleep(
    monkeypatch: pytest.MonkeyPatch,
    environment: Callable[[], Mapping[str, str | None]],
    before: str | None,
    after: str,
) -> None:
    monkeypatch.setenv(POLICY, before or "")
    if before is None:
        monkeypatch.delenv(POLICY)
    assert environment()[POLICY] == after
    assert asleep() == {POLICY: after}
