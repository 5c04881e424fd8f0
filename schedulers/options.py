"""What a job can be placed on, by the planner's prediction: nobody types a wall time.

found = options(tokens, {"H800": h800, "RTX3090": rtx3090}, lambda profile: best_batch(facts_of, profile).best...)
WaitingJob(..., options=found.options, limits=found.limits)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ..jobs.model_facts import ModelFacts
from ..jobs.units import format_bytes, format_needed
from .demand import Demand, demand
from .hardware import HardwareProfile
from .placement.question import Option
from .planner import Plan

Planned = tuple[ModelFacts, Plan]
"""A model's facts at the batch that was planned, and the planner's answer."""
PlanOn = Callable[[HardwareProfile], Planned]
"""Plans one job for a machine."""
_RESOURCES: Final = {"gpu_memory": "GPU memory", "host_memory": "host memory", "nvme": "NVMe"}


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Where a job can run: an option per kind of node that can hold it, the planner's words for every other kind."""

    options: tuple[Option, ...]
    limits: dict[str, str]


def options(
    work_tokens: float,
    machines: Mapping[str, HardwareProfile],
    plan_on: PlanOn,
    *,
    startup_s: float = 0.0,
    gpus: Mapping[str, int] | None = None,
) -> JobOptions:
    """Ask the planner about every kind of machine.

    ``machines`` maps a kind of GPU to the profile of one GPU with all of its node's host memory, ``gpus`` to how many
    GPUs share that memory: a job is planned for an equal part of it, and for more only if it does not fit in that.
    ``plan_on`` may raise what the planner raises, OutOfTime for example: that is not an answer, and passes through.
    """
    found: list[Option] = []
    limits: dict[str, str] = {}
    for kind, profile in machines.items():
        facts, answer = _planned(profile, plan_on, (gpus or {}).get(kind, 1))
        if answer.policy is None:
            limits[kind] = limit_words(answer)
        else:
            asked = demand(answer.policy, facts, answer.predicted)
            found.append(option(asked, kind=kind, work_tokens=work_tokens, startup_s=startup_s))
    return JobOptions(tuple(found), limits)


def _planned(profile: HardwareProfile, plan_on: PlanOn, gpus: int) -> Planned:
    if gpus > 1:
        part = profile.model_copy(update={"host_memory_bytes": profile.host_memory_bytes // gpus})
        facts, answer = plan_on(part)
        if answer.feasible:
            return facts, answer
    return plan_on(profile)


def option(asked: Demand, *, kind: str, work_tokens: float, startup_s: float = 0.0) -> Option:
    """The option of a job with this demand and ``work_tokens`` left to train."""
    return Option(kind=kind, work_tokens=work_tokens, startup_s=startup_s, **asked.model_dump())


def limit_words(answer: Plan) -> str:
    """Why a plan does not fit, for a person: ``needs 112GiB of host memory, has 96GiB``."""
    short = [
        f"needs {format_needed(reason.needed_bytes)} of {_RESOURCES.get(reason.resource, reason.resource)}, "
        f"has {format_bytes(reason.available_bytes)}"
        for reason in answer.reasons
    ]
    return " and ".join(short) or "no plan fits"
