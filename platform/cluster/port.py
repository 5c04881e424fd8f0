"""What the platform asks of a cluster. Ray answers in production, a fake in tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # torch is a matter of the processes that train
    from ...jobs.policy import Policy
    from ...jobs.spec import JobSpec
    from ...jobs.train import Result
    from ...schedulers.hardware import HardwareProfile


@dataclass(frozen=True)
class Node:
    """One machine of the cluster, as far as it can be placed on."""

    id: str
    address: str
    kind: str
    """Our own name of its GPU (label ``lt/gpu-kind``); empty for a node without one."""
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Tracking:
    """Which MLflow run the training writes to."""

    uri: str
    experiment: str
    run_name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingOrder:
    """Everything a training process needs; it travels to the worker as it stands."""

    job_id: str
    """Unique: a second run under the same name would continue the first."""
    spec: JobSpec
    policy: Policy
    device: Any
    """``"cpu"``, ``"cuda"`` or an ``Emulated``, as `jobs.executor.stream` takes it."""
    run_dir: Path
    """Absolute; the worker runs in a directory of its own."""
    kind: str = ""
    """Only nodes with this kind of GPU; empty for any."""
    tracking: Tracking | None = None
    retries: int = 1
    """How often a worker that died (not one that reported an error) is started again, from its last checkpoint."""


OnMetrics = Callable[[Mapping[str, float]], None]
"""Called in the caller's process with each record of the run's metric log."""


class Cluster(Protocol):
    """A place to run things; closing it leaves nothing running."""

    def nodes(self) -> list[Node]:
        """The nodes that are alive."""

    def profile(self, base: HardwareProfile, nvme_dir: Path | None) -> HardwareProfile:
        """Measure the node that has the GPU ``base`` names."""

    def train(self, order: TrainingOrder, on_metrics: OnMetrics) -> Result:
        """Train to the end. Raises the error that the training process raised."""

    def close(self) -> None:
        """Stop everything this cluster object started."""
