"""From a model's facts and a machine to a plan: what the planner may use, what it answers, what probes correct.

Torch and the solver are imported where they are used: a node that measures models for a server has no solver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..jobs.errors import DoesNotFit, HardwareError, InputError
from ..jobs.model_facts import ModelFacts
from ..jobs.optimizer_bytes import DEFAULT_OPTIMIZER, OptimizerOptions
from ..jobs.policy import Policy
from ..jobs.units import MOST_SOLVE_S, format_bytes, format_needed
from ..schedulers.batch_search import BatchSearch, Probe
from ..schedulers.hardware import HardwareProfile, hardware
from ..schedulers.simulator import simulate

if TYPE_CHECKING:
    from ..jobs.executor.devices import Emulated
    from ..jobs.spec import JobSpec
    from ..schedulers.planner import Plan

PLAIN_BYTES_PER_PARAMETER = 16
"""Mixed-precision AdamW without offloading: bf16 weight and gradient, float32 master, m and v."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the planner may use; None means what the profile offers. Raises InputError for an impossible time."""

    planner: str = "full"
    gpu_memory: str | int | None = None
    host_memory: str | int | None = None
    nvme: str | int | None = None
    solve_seconds: float = 20.0
    optimizer: OptimizerOptions = DEFAULT_OPTIMIZER

    def __post_init__(self) -> None:
        if not 0 < self.solve_seconds <= MOST_SOLVE_S:
            raise InputError(
                f"the solver cannot have {self.solve_seconds:g} seconds",
                hint=f"give it some, and not more than {MOST_SOLVE_S:,.0f}",
            )

    @classmethod
    def of(cls, spec: JobSpec) -> Limits:
        """The limits that the job file states."""
        section = spec.plan
        return cls(
            planner=section.planner,
            gpu_memory=None if section.gpu_memory == "auto" else section.gpu_memory,
            host_memory=None if section.host_memory == "auto" else section.host_memory,
            nvme=None if section.nvme else 0,
            solve_seconds=section.solve_seconds,
            optimizer=OptimizerOptions.model_validate(spec.optimizer.arguments()),
        )

    def override(self, **given: Any) -> Limits:
        """These limits with every given value that is not None in place of its own."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def import_solver() -> None:
    """Import what `make_plan` needs, ahead of it."""
    from ..schedulers import planner  # noqa: F401


def make_plan(
    facts: ModelFacts,
    profile: HardwareProfile,
    limits: Limits,
    *,
    facts_at: Callable[[int], ModelFacts] | None = None,
) -> Plan:
    """The planner's answer; a plan that does not fit is an answer too.

    With ``facts_at`` it says whether a smaller micro-batch would fit.
    """
    from ..schedulers.planner import plan

    return plan(
        facts,
        profile,
        planner=limits.planner,
        gpu_memory=limits.gpu_memory,
        host_memory=limits.host_memory,
        nvme=limits.nvme,
        solve_seconds=limits.solve_seconds,
        optimizer=limits.optimizer,
        facts_at=facts_at,
    )


def feasible_policy(answer: Plan) -> Policy:
    """The policy of a feasible plan. Raises DoesNotFit with the reasons otherwise."""
    if answer.policy is None:
        raise does_not_fit(answer)
    return answer.policy


def does_not_fit(answer: Plan) -> DoesNotFit:
    """The reasons of an infeasible plan as an error."""
    reasons = tuple(reason.model_dump(mode="json") for reason in answer.reasons)
    short = "; ".join(
        f"{r.resource} needs {format_needed(r.needed_bytes)}, has {format_bytes(r.available_bytes)}"
        for r in answer.reasons
    )
    hint = answer.reasons[0].hint if answer.reasons else ""
    if answer.changes:
        hint = "; or ".join(change.words for change in answer.changes)
    return DoesNotFit(f"no plan fits: {short}", reasons=reasons, hint=hint)


def device_kind(text: str) -> tuple[str, HardwareProfile | None]:
    """What ``--device`` names: ``cpu`` or ``cuda``, or ``emulated`` with the profile of the GPU to emulate.

    ``auto`` is the GPU if there is one. Raises HardwareError for anything else.
    """
    import torch

    if text == "auto":
        return ("cuda" if torch.cuda.is_available() else "cpu"), None
    if text in ("cpu", "cuda"):
        return text, None
    kind, _, gpu = text.partition(":")
    if kind == "emulated" and gpu:
        return "emulated", hardware(gpu).model_copy(update={"device": "emulated"})
    raise HardwareError(
        f"no device is called {text!r}", hint="use auto, cpu, cuda or emulated:GPU, as in emulated:H800"
    )


def emulated(profile: HardwareProfile) -> Emulated:
    """The emulated device with the memory and the links of ``profile``."""
    from ..jobs.executor.devices import Emulated

    return Emulated(**emulated_fields(profile))


def emulated_fields(profile: HardwareProfile) -> dict[str, Any]:
    """Fields of `emulated`, also where torch is not installed."""
    return {
        "memory_bytes": profile.gpu_budget_bytes,
        "h2d_bytes_s": profile.h2d_bytes_s,
        "d2h_bytes_s": profile.d2h_bytes_s,
        "nvme_read_bytes_s": profile.nvme_read_bytes_s,
        "nvme_write_bytes_s": profile.nvme_write_bytes_s,
    }


def plain_training_bytes(facts: ModelFacts) -> int:
    """GPU bytes of training the model without streaming: all states, and all that autograd keeps."""
    kept = sum(unit.saved_bytes for unit in facts.units)
    return facts.parameters * PLAIN_BYTES_PER_PARAMETER + kept + facts.side_bytes + facts.head.backward_workspace_bytes


def predicted_batch(plan_batch: Callable[[int], Plan], *, low: int, high: int) -> Plan:
    """The plan of the batch with the most predicted tokens/s; nothing is run. Raises DoesNotFit when none fits."""
    search = BatchSearch(low, high, "throughput")
    plans: dict[int, Plan] = {}
    while (batch := search.ask()) is not None:
        answer = plans[batch] = plan_batch(batch)
        speed = answer.predicted.tokens_per_s if answer.predicted else 0.0
        search.tell(
            batch, Probe(answer.feasible, speed, reason="" if answer.feasible else does_not_fit(answer).message)
        )
    return plans[search.best.batch]


@dataclass(frozen=True)
class Observation:
    """A step that was run: by which policy, and how long it took."""

    facts: ModelFacts
    policy: Policy
    step_s: float


def calibrate(profile: HardwareProfile, observations: Sequence[Observation]) -> HardwareProfile:
    """``profile`` with the speed of compute at which predicted step times come closest to the measured ones.

    One factor scales the matrix rate and divides the overhead of operations. The square of log(predicted / measured) is
    minimised by golden-section search; predicted time falls with the factor, so there is one minimum. Without
    observations the profile is returned as it is.
    """
    if not observations:
        return profile

    def miss(log_factor: float) -> float:
        tried = _faster(profile, math.exp(log_factor))
        return sum(math.log(simulate(o.policy, o.facts, tried).step_s / o.step_s) ** 2 for o in observations)

    return _faster(profile, math.exp(golden_section(miss, math.log(1e-4), math.log(1e2))))


def _faster(profile: HardwareProfile, factor: float) -> HardwareProfile:
    """The profile of a device that computes ``factor`` times as fast.

    Layers cannot reach more than the matrix rate; beyond that the rate was measured too low, because something else
    ran at the time, and is corrected.
    """
    share = profile.efficiency * factor
    return profile.model_copy(
        update={
            "efficiency": min(1.0, share),
            **profile.faster(max(1.0, share)),
            "operation_overhead_s": profile.operation_overhead_s / factor,
        }
    )


def golden_section(function: Callable[[float], float], low: float, high: float, *, steps: int = 30) -> float:
    """Where a function with one minimum in [low, high] has it."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(steps):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) <= function(right):
            high = right
        else:
            low = left
    return (low + high) / 2
