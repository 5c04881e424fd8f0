"""An actor per GPU that measures the node it is on."""

from __future__ import annotations

from pathlib import Path

import ray
import ray.exceptions

from ...jobs.errors import LazytrainError
from ...schedulers.hardware import HardwareProfile
from .inventory import list_nodes, require, selector


class Profiler:
    """Holds the GPU while it measures, so that nobody else does."""

    def measure(self, base: HardwareProfile | None, nvme_dir: Path | None, reserve_bytes: int) -> HardwareProfile:
        """The node's profile; ``base`` as in `probe.measure`."""
        from ..probe import measure  # torch is imported in the actor, not where it is called from

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
