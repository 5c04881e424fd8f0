"""The cluster port on Ray."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ...schedulers.hardware import HardwareProfile
from ..settings import Settings
from .inventory import list_nodes
from .local import LocalRay
from .port import Node, OnMetrics, TrainingOrder
from .profiling import profile_node

if TYPE_CHECKING:
    from ...jobs.train import Result


class RayCluster:
    """A local Ray with one (real or emulated) GPU of ``kind``; implements `port.Cluster`."""

    def __init__(self, settings: Settings, *, kind: str, cpus: int | None = None) -> None:
        self._settings = settings
        self._kind = kind
        self._ray = LocalRay(settings, kind=kind, cpus=cpus)
        self.cpus = self._ray.cpus

    def nodes(self) -> list[Node]:
        """The nodes that are alive."""
        return list_nodes()

    def profile(self, base: HardwareProfile, nvme_dir: Path | None) -> HardwareProfile:
        """Measure the node, in an actor that holds its GPU and its CPUs."""
        return profile_node(
            base,
            nvme_dir,
            cpus=self.cpus,
            kind=self._kind,
            reserve_bytes=int(self._settings.host_reserve),
            timeout_s=self._settings.start_timeout_s,
        )

    def train(self, order: TrainingOrder, on_metrics: OnMetrics) -> Result:
        """One Ray Train run; raises what the worker raised."""
        from .training import run_training  # brings torch, which the controller has no use for

        return run_training(order, on_metrics, cpus=self.cpus, stop_timeout_s=self._settings.stop_timeout_s)

    def close(self) -> None:
        """Stop all of Ray's processes."""
        self._ray.close()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
