"""An actor per GPU that measures the node it is on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions

from ...jobs.errors import LazytrainError
from ...schedulers.hardware import HardwareProfile
from ..inspection import Device, list_devices
from .inventory import list_nodes, require, selector

if TYPE_CHECKING:  # torch is imported in the actor, not where it is called from
    from ..probe.copies import Copier, Way


class Profiler:
    """Holds the GPU while it measures, so that nobody else does."""

    def __init__(self) -> None:
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as the driver's tool counts, which says what GPU this is
        self._copier: Copier | None = None

    def device(self) -> Device | None:
        """What the driver says of the GPU; None without a driver, as where it is emulated."""
        return next(iter(list_devices()), None)

    def copy(
        self, base: HardwareProfile | None, ways: Sequence[Way], meet: Callable[[], None] | None = None
    ) -> list[float]:
        """As `Copier.rates`; without ``meet`` no other GPU copies."""
        from ..probe.copies import Copier, nobody

        self._copier = self._copier or Copier(base)
        return self._copier.rates(ways, meet or nobody)

    def copy_with(self, base: HardwareProfile | None, ways: Sequence[Way], leader: Any) -> list[float]:
        """The same while other GPUs copy, whose profilers meet at an actor that has `NodeProfiler.meet`."""
        return self.copy(base, ways, lambda: ray.get(leader.meet.remote()))

    def measure(self, base: HardwareProfile | None, nvme_dir: Path | None, reserve_bytes: int) -> HardwareProfile:
        """The node's profile; ``base`` as in `probe.measure`."""
        from ..probe import measure

        return measure(base, nvme_dir=nvme_dir, host_reserve_bytes=reserve_bytes).profile


def profile_node(
    base: HardwareProfile, nvme_dir: Path | None, *, cpus: int, kind: str, reserve_bytes: int, timeout_s: float
) -> HardwareProfile:
    """Measure the node with a GPU of ``kind``. Raises HardwareError when there is none, LazytrainError otherwise."""
    wanted = {"CPU": float(cpus), "GPU": 1.0}
    require(list_nodes(), wanted, kind)
    remote = ray.remote(num_cpus=cpus, num_gpus=1, max_restarts=0, label_selector=selector(kind))(Profiler)
    actor = remote.remote()
    try:
        profile: HardwareProfile = ray.get(actor.measure.remote(base, nvme_dir, reserve_bytes), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise LazytrainError(
            f"the profiling actor did not answer within {timeout_s:g} s",
            hint="its GPU or CPUs may be in use; raise LAZYTRAIN_START_TIMEOUT_S if the machine is slow",
        ) from error
    except ray.exceptions.RayError as error:
        from .failures import translate  # brings Ray Train and with it torch

        raise translate(error) from error
    finally:
        ray.kill(actor)
    return profile
