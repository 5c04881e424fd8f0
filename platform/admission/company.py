"""Another policy for a run whose neighbours have changed: one has come, or one has gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...jobs.errors import DoesNotFit, OutOfTime
from ...jobs.policy import Policy
from ...jobs.spec import JobSpec
from ...schedulers.demand import demand
from ...schedulers.hardware import HardwareProfile
from ...schedulers.options import Planned
from ...schedulers.planner import Plan, plan
from ...schedulers.simulator.predict import predict
from ...schedulers.together import Joint, plan_together
from .drift import limits_of
from .measuring import Measuring
from .together import neighbours_of, node_of

WORTH: Final = 0.05
"""Gain in speed from which a run is switched to another policy."""
_ALIKE: Final = 0.01
"""By which share of its speed a neighbour may be worse off."""
_NOTHING: Final = {"words": "", "policy": None, "tokens_per_s": 0.0}


def plan_for_company(asked: Mapping[str, Any], measuring: Measuring) -> dict[str, Any]:
    """What a new policy would gain for a run beside those that are on its node now.

    ``asked`` holds the job's ``spec``, the ``policy`` that runs, the node's ``profile``, ``gpu_bytes``, the device
    memory that the run has (None: all of it), and as for `plan_beside` the ``node``, the PCIe ``root`` of its GPU and
    who is ``beside`` it. The new policy takes no more memory than the old one. The answer is that of `plan_for_drift`,
    with what the policy asks of the node (fields of `Demand`) in ``option``: a policy only where it is expected to be
    faster by `WORTH`, can be switched to, and slows no neighbour.
    """
    spec, policy = JobSpec.model_validate(asked["spec"]), Policy.model_validate(asked["policy"])
    profile, limits = HardwareProfile.model_validate(asked["profile"]), limits_of(spec, policy, asked["gpu_bytes"])
    shape = (policy.micro_batch, policy.sequence_length)
    facts = measuring.facts(spec, batch=shape[0], length=shape[1], dtype=spec.model.dtype)

    def keep(machine: HardwareProfile) -> Planned:
        return facts, Plan(feasible=True, policy=policy, predicted=predict(policy, facts, profile))

    def renew(machine: HardwareProfile) -> Planned:
        try:
            return facts, plan(facts, machine, accumulation=policy.accumulation, **limits)
        except (DoesNotFit, OutOfTime):
            return facts, Plan(feasible=False)

    node, root, beside = node_of(asked["node"]), asked["root"], neighbours_of(asked["beside"])
    kept, renewed = (plan_together([way], [profile], node, [root], beside) for way in (keep, renew))
    new = renewed.planned[0][1].policy
    if new is None or new.homes_of_state != policy.homes_of_state or not _is_better(kept, renewed):
        return dict(_NOTHING)
    (old_rate,), (rate,) = kept.tokens_per_s, renewed.tokens_per_s
    company = f"beside {len(beside)} other job{'s' if len(beside) > 1 else ''}" if beside else "alone on its node"
    asks = demand(new, facts, renewed.planned[0][1].predicted)
    return {
        "words": f"{company} it is expected to reach {rate:,.0f} tokens/s by it, and {old_rate:,.0f} by the one before",
        "policy": new.model_dump(mode="json", by_alias=True),
        "tokens_per_s": rate,
        "option": asks.model_dump(mode="json"),
    }


def _is_better(kept: Joint, renewed: Joint) -> bool:
    if not (kept.feasible and renewed.feasible) or renewed.tokens_per_s[0] < (1 + WORTH) * kept.tokens_per_s[0]:
        return False
    return all(new >= old - _ALIKE for new, old in zip(renewed.beside, kept.beside, strict=True))
