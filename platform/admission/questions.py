"""What the planning process can be asked beside planning a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...jobs.model_facts import ModelFacts
from ...jobs.policy import Policy
from ...jobs.spec import JobSpec
from ...schedulers.hardware import HardwareProfile, hardware
from ...schedulers.simulator import simulate
from ..planning import Limits, make_plan
from .company import plan_for_company
from .drift import plan_for_drift
from .measuring import Measuring
from .together import plan_beside


def plan_shape(asked: Mapping[str, Any], measuring: Measuring) -> dict[str, Any]:
    """Plan a model at a batch for a machine, as ``lazytrain plan --model`` does.

    ``asked`` holds ``model``, ``batch``, ``length``, ``dtype``, ``planner``, ``gpu_memory``, ``host_memory``, ``nvme``,
    ``solve_seconds``, and the machine as ``profile`` (fields of `HardwareProfile`) or ``gpu`` (a name that
    `hardware` knows). The answer is that of ``plan --json`` with ``machine``, ``model`` and the predicted ``timeline``.
    """
    budgets: dict[str, Any] = {name: asked.get(name) for name in ("gpu_memory", "host_memory", "nvme")}
    profile = _profile(asked, budgets)

    def facts_at(batch: int) -> ModelFacts:
        return measuring.facts(asked["model"], batch=batch, length=asked["length"], dtype=asked["dtype"])

    facts = facts_at(asked["batch"])
    limits = Limits(planner=asked["planner"], solve_seconds=asked["solve_seconds"], **budgets)
    answer = make_plan(facts, profile, limits, facts_at=facts_at)
    timeline = simulate(answer.policy, facts, profile).to_dict() if answer.policy is not None else None
    about = {"architecture": facts.architecture, "parameters": facts.parameters, "layers": len(facts.layers)}
    machine = profile.model_dump(mode="json")
    return {**answer.to_dict(), "model": about, "machine": machine, "timeline": timeline}


def _profile(asked: Mapping[str, Any], budgets: Mapping[str, Any]) -> HardwareProfile:
    if asked.get("profile"):
        return HardwareProfile.model_validate(asked["profile"])
    return hardware(asked["gpu"], **budgets)


def predicted_timeline(asked: Mapping[str, Any], measuring: Measuring) -> dict[str, Any]:
    """One step of a job as the simulator expects it: ``spec``, ``policy`` and ``profile``, each as JSON values."""
    spec, policy = JobSpec.model_validate(asked["spec"]), Policy.model_validate(asked["policy"])
    shape = (policy.micro_batch, policy.sequence_length)
    facts = measuring.facts(spec, batch=shape[0], length=shape[1], dtype=spec.model.dtype)
    return simulate(policy, facts, HardwareProfile.model_validate(asked["profile"])).to_dict()


QUESTIONS: dict[str, Callable[[Mapping[str, Any], Measuring], dict[str, Any]]] = {
    "shape": plan_shape,
    "timeline": predicted_timeline,
    "together": plan_beside,
    "drift": plan_for_drift,
    "company": plan_for_company,
}
