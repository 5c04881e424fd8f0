"""Fixed rules as policies: what people use without a solver, and what every plan is held against."""

from __future__ import annotations

from typing import Any

from ..jobs.errors import DoesNotFit, InputError
from ..jobs.model_facts import ModelFacts
from ..jobs.optimizer_bytes import DEFAULT_OPTIMIZER, OptimizerOptions
from ..jobs.policy import Policy, Program
from ..jobs.policy.artifact import Home
from ..jobs.units import format_bytes
from .costs import host_bytes, lowered, staging_bytes, state_bytes
from .hardware import Budgets, HardwareProfile


def megatrain(facts: ModelFacts, interval: int = 4, *, accumulation: int = 1) -> Policy:
    """MegaTrain's rule: every ``interval``-th boundary stays on the GPU, blocks are recomputed from it.

    It looks at no budget; `shortages` says whether it fits. Raises InputError for an interval below 1.
    """
    kept = _marks(facts, interval)
    homes: list[Home] = ["gpu" if i in kept else "recompute" for i in range(len(facts.layers))]
    return Policy.from_homes(facts, [*homes, "gpu"], accumulation=accumulation)


def keep_all(facts: ModelFacts, *, accumulation: int = 1) -> Policy:
    """Plain training: every boundary and all that autograd keeps stay on the GPU, nothing is run twice.

    It looks at no budget; `shortages` says whether it fits.
    """
    policy = Policy.from_homes(facts, ["gpu"] * (len(facts.layers) + 1), accumulation=accumulation)
    layers = tuple(layer.model_copy(update={"internals": "all"}) for layer in policy.layers)
    return policy.model_copy(update={"layers": layers})


def every_layer(
    facts: ModelFacts,
    profile: HardwareProfile | None = None,
    *,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    nvme: str | int | None = None,
    accumulation: int = 1,
    optimizer: OptimizerOptions = DEFAULT_OPTIMIZER,
) -> Policy:
    """Every boundary materialised: on the GPU while it fits, then on the host, then on NVMe. Raises DoesNotFit.

    Without a profile it looks at no budget, as the rules above. Raises InputError if it is given one all the same.
    """
    if profile is None:
        if (gpu_memory, host_memory, nvme) != (None, None, None):
            raise InputError("amounts of memory are those of a machine", hint="give its profile too: hardware('H800')")
        return megatrain(facts, 1, accumulation=accumulation)
    budgets = Budgets.of(profile, gpu_memory=gpu_memory, host_memory=host_memory, nvme=nvme)
    return every_kth(facts, profile, budgets, interval=1, accumulation=accumulation, optimizer=optimizer)


def every_kth(
    facts: ModelFacts,
    profile: HardwareProfile,
    budgets: Budgets,
    *,
    interval: int,
    accumulation: int = 1,
    optimizer: OptimizerOptions = DEFAULT_OPTIMIZER,
) -> Policy:
    """As `every_layer`, for every ``interval``-th boundary; the others are recomputed.

    The earliest boundaries leave the GPU, because their copies have the most time, and the very first go to NVMe.
    Raises DoesNotFit with the resource that is short.
    """
    rooms = host_rooms(facts, budgets, accumulation, optimizer)

    def policy(leaving: int) -> Policy:
        homes = _homes(facts, rooms, budgets.nvme_bytes > 0, interval, leaving)
        made = Policy.from_homes(facts, homes, accumulation=accumulation)
        return made.model_copy(update={"hardware_digest": profile.digest, "optimizer": optimizer})

    few, many = 0, len(_marks(facts, interval))
    if not _fits_gpu(policy(0), facts, budgets):
        while few + 1 < many:  # `few` leaving the GPU do not fit, `many` do unless nothing does
            middle = (few + many) // 2
            few, many = (few, middle) if _fits_gpu(policy(middle), facts, budgets) else (middle, many)
        few = many
    chosen = policy(few)
    reasons = shortages(chosen, facts, budgets)
    if reasons:
        raise DoesNotFit(
            f"keeping {'every boundary' if interval == 1 else f'one boundary in {interval}'} does not fit: "
            + "; ".join(f"{r['resource']} is {format_bytes(r['shortfall_bytes'])} short" for r in reasons),
            reasons=tuple(reasons),
            hint=reasons[0]["hint"],
        )
    return chosen


def shortages(
    policy: Policy, facts: ModelFacts, budgets: Budgets, program: Program | None = None
) -> list[dict[str, Any]]:
    """One entry per tier whose budget the policy's program may pass; empty when the policy fits."""
    program = program or lowered(policy, facts)
    needed = {
        "gpu_memory": (program.peak_bytes("gpu"), budgets.gpu_bytes),
        "host_memory": (sum(host_bytes(facts, policy, program).values()), budgets.host_bytes),
        "nvme": (program.peak_bytes("nvme"), budgets.nvme_bytes),
    }
    return [shortage(resource, need, have) for resource, (need, have) in needed.items() if need > have]


_HINTS = {
    "gpu_memory": "a smaller batch or shorter rows, a GPU with more memory, or more host memory to move boundaries to",
    "host_memory": "more host memory, NVMe for boundaries, or a smaller batch",
    "nvme": "more room on NVMe, or a smaller batch",
}


def shortage(resource: str, needed: int, available: int, hint: str = "") -> dict[str, Any]:
    """A reason for which nothing fits, in the form that ``plan --json`` prints."""
    return {
        "resource": resource,
        "needed_bytes": needed,
        "available_bytes": available,
        "shortfall_bytes": needed - available,
        "hint": hint or _HINTS[resource],
    }


def _marks(facts: ModelFacts, interval: int) -> range:
    if interval < 1:
        raise InputError(f"a block has at least 1 layer, not {interval}")
    return range(0, len(facts.layers), interval)


def _fits_gpu(policy: Policy, facts: ModelFacts, budgets: Budgets) -> bool:
    return lowered(policy, facts).peak_bytes("gpu") <= budgets.gpu_bytes


def host_rooms(
    facts: ModelFacts, budgets: Budgets, accumulation: int = 1, optimizer: OptimizerOptions = DEFAULT_OPTIMIZER
) -> tuple[int, int]:
    """Host bytes left for boundaries: when all that leave the GPU stay on the host, and when some go on to NVMe."""
    state = state_bytes(facts, accumulation=accumulation, optimizer=optimizer)
    free = budgets.host_bytes - sum(state.values())
    return free - staging_bytes(facts, "host", accumulation), free - staging_bytes(facts, "nvme", accumulation)


def _homes(facts: ModelFacts, rooms: tuple[int, int], has_nvme: bool, interval: int, leaving: int) -> list[Home]:
    """Homes when the first ``leaving`` materialised boundaries leave the GPU."""
    size = max(facts.boundary_bytes)
    on_host = min(leaving, max(0, rooms[0]) // size)
    if on_host < leaving:
        on_host = max(0, rooms[1]) // size if has_nvme else leaving
    homes: list[Home] = ["recompute"] * len(facts.layers)
    for rank, mark in enumerate(_marks(facts, interval)):
        homes[mark] = "nvme" if rank < leaving - on_host else "host" if rank < leaving else "gpu"
    return [*homes, "gpu"]
