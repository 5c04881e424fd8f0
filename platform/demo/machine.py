"""The demo's GPU: emulated, and as small for the demo's model as real GPUs are for real ones."""

from __future__ import annotations

from ...jobs.errors import DoesNotFit
from ...jobs.model_facts import ModelFacts
from ...jobs.policy import Policy, lower
from ...jobs.policy.artifact import Home
from ...schedulers.costs import forward_seconds, staging_bytes, state_bytes
from ...schedulers.hardware import HardwareProfile
from ..planning import Limits, make_plan

KIND = "demo-gpu"
_LOAD_SHARE = 0.4
"""Loading a layer takes this share of its forward, as for a 7B model with 6 x 1024 tokens on an RTX 3090."""
_NVME_SHARE = 0.5
"""NVMe rates over that GPU's link: a PCIe 5 drive's 12 over 25 GB/s."""
_ROOMS = [(gpu, nvme, host) for gpu in (1, 2, 3) for nvme in (5, 4, 3) for host in (1, 2)]
"""Boundaries with room on the GPU, on NVMe and on the host, in the order in which they are tried."""
_UNKNOWN = 10**9


def base_profile() -> HardwareProfile:
    """What is emulated, before anything is measured: the numbers stand for none."""
    return HardwareProfile(
        name="emulated demo GPU",
        kind=KIND,
        device="emulated",
        gpu_memory_bytes=_UNKNOWN,
        matmul_flops={"float32": _UNKNOWN},
        h2d_bytes_s=_UNKNOWN,
        d2h_bytes_s=_UNKNOWN,
        host_memory_bytes=_UNKNOWN,
        host_bytes_s=_UNKNOWN,
        update_parameters_s=_UNKNOWN,
        nvme_bytes=_UNKNOWN,
        nvme_read_bytes_s=_UNKNOWN,
        nvme_write_bytes_s=_UNKNOWN,
    )


def scale_links(profile: HardwareProfile, facts: ModelFacts) -> HardwareProfile:
    """Links and NVMe as slow against this machine's compute as an RTX 3090's are against its own.

    Of NVMe and of the overhead of operations nothing measured remains: what else runs for a moment would change the
    plan. The overhead becomes part of the layers' speed, to which the probes calibrate it.
    """
    layer = facts.layers[0]
    link = layer.weight_bytes / (_LOAD_SHARE * forward_seconds(layer, facts, profile))
    return profile.model_copy(
        update={
            "h2d_bytes_s": link,
            "d2h_bytes_s": link,
            "nvme_read_bytes_s": link * _NVME_SHARE,
            "nvme_write_bytes_s": link * _NVME_SHARE,
            "operation_overhead_s": 0.0,
        }
    )


def tight_limits(facts: ModelFacts, profile: HardwareProfile, limits: Limits) -> Limits:
    """Budgets so tight that the plan needs every kind of home.

    The GPU holds what streaming needs and a boundary or two, the host one boundary beside the staging for NVMe, NVMe a
    few; the rest has to be recomputed. With few layers not every kind can be forced: then the plan with the most kinds
    decides. Raises DoesNotFit when the planner can meet none of the budgets.
    """
    size = max(facts.boundary_bytes)
    best: tuple[int, Limits] | None = None
    for on_gpu, on_nvme, on_host in _ROOMS:
        tried = limits.override(
            gpu_memory=_least_gpu_bytes(facts) + on_gpu * size,
            host_memory=_least_host_bytes(facts, limits) + on_host * size,
            nvme=on_nvme * size,
        )
        policy = make_plan(facts, profile, tried).policy
        kinds = sum(count > 0 for count in policy.count_homes().values()) if policy else 0
        if best is None or kinds > best[0]:
            best = kinds, tried
        if kinds == 4:
            break
    if best is None or best[0] == 0:
        raise DoesNotFit("the demo's model fits none of the demo's budgets")
    return best[1]


def _least_gpu_bytes(facts: ModelFacts) -> int:
    """What the GPU needs when every boundary leaves it."""
    homes: list[Home] = ["host"] * len(facts.layers)
    return lower(Policy.from_homes(facts, [*homes, "gpu"]), facts).peak_bytes("gpu")


def _least_host_bytes(facts: ModelFacts, limits: Limits) -> int:
    """What the host needs when boundaries only pass through it on their way to NVMe."""
    return sum(state_bytes(facts, optimizer=limits.optimizer).values()) + staging_bytes(facts, "nvme", 1)
