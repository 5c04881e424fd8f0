"""Jobs and nodes made by hand: an H800 does 10 tokens a second, an RTX 3090 one, memory in whole GiB."""

from __future__ import annotations

from typing import Any

import pytest

from lazytrain.schedulers.placement import Gpu, NodeState, Option, RunningJob, WaitingJob

GIB = 1 << 30
RATES = {"H800": 10.0, "RTX3090": 1.0}


class Make:
    """Builds what a question holds from the few values that a test is about."""

    @staticmethod
    def option(kind: str = "H800", *, hours: float = 1.0, host: int = 10, **changes: Any) -> Option:
        """``hours`` of work for the kind's rate."""
        rate = changes.pop("rate", RATES[kind])
        return Option(kind=kind, tokens_per_s=rate, work_tokens=hours * 3600 * rate, host_bytes=host * GIB, **changes)

    @classmethod
    def job(
        cls,
        name: str,
        *,
        kinds: tuple[str, ...] = ("H800",),
        hours: float = 1.0,
        host: int = 10,
        needs: dict[str, Any] | None = None,
        **changes: Any,
    ) -> WaitingJob:
        """``hours`` is the run time on the first kind; on others it is in proportion to their rates."""
        work = hours * RATES[kinds[0]]
        options = tuple(cls.option(k, hours=work / RATES[k], host=host, **(needs or {})) for k in kinds)
        fields: dict[str, Any] = {"user": "ada", "priority": 50, "submitted_s": 0.0, "options": options}
        return WaitingJob(id=name, **(fields | changes))

    @classmethod
    def running(cls, name: str, node: str, gpu: str | None, **changes: Any) -> RunningJob:
        """A job that has run for an hour and has one to go."""
        option = cls.option(changes.pop("kind", "H800"), host=changes.pop("host", 10), **changes.pop("needs", {}))
        fields: dict[str, Any] = {"user": "bob", "priority": 50, "started_s": -3600.0, "remaining_s": 3600.0}
        return RunningJob(id=name, node=node, gpu=gpu, option=option, **(fields | changes))

    @staticmethod
    def node(name: str, kind: str = "H800", *, gpus: int = 1, host: int = 100, **changes: Any) -> NodeState:
        """GPUs ``0`` to ``gpus - 1``, each under a PCIe root of its own."""
        cards = changes.pop("cards", tuple(Gpu(id=str(i), pcie_root=str(i)) for i in range(gpus)))
        return NodeState(name=name, kind=kind, gpus=cards, host_bytes=host * GIB, **changes)


@pytest.fixture(scope="session")
def make() -> type[Make]:
    return Make
