"""Planning jobs for the node that they are about to share with others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...jobs.errors import DoesNotFit
from ...jobs.spec import JobSpec
from ...schedulers.best_batch import Tried
from ...schedulers.hardware import HardwareProfile
from ...schedulers.options import Planned
from ...schedulers.placement import Gpu, NodeState, Option
from ...schedulers.planner import Plan
from ...schedulers.together import Neighbour, plan_together
from .measuring import Measuring
from .plan_job import JobPlans
from .values import AdmissionOrder, Way


@dataclass(frozen=True)
class _Starting:
    """A job that is about to start."""

    plans: JobPlans
    batch: int
    host_bytes: int
    """Host memory that its plan may take, as much as when it was let in."""

    def on(self, profile: HardwareProfile) -> Planned:
        """Planned for a machine with these links and no more than this memory."""
        memory = min(profile.host_memory_bytes, self.host_bytes)
        try:
            tried = self.plans.best_on(profile.model_copy(update={"host_memory_bytes": memory}), self.batch)
        except DoesNotFit:
            return self.plans.facts(1), Plan(feasible=False)
        return self.plans.facts(tried.micro_batch), tried.answer

    def way(self, kind: str, profile: HardwareProfile, planned: Planned) -> Way:
        """What placement and the run need of the plan."""
        facts, answer = planned
        tried = Tried(facts.micro_batch, self.batch // facts.micro_batch, answer)
        return self.plans.way(kind, profile, tried, self.batch)


def plan_beside(asked: Mapping[str, Any], measuring: Measuring) -> dict[str, Any]:
    """Plan jobs that start on one node, together and beside those that run there.

    ``asked`` holds the node's ``profile`` (fields of `HardwareProfile`) and its ``node`` (fields of `NodeState`); the
    ``starting`` jobs with their ``spec``, ``cache``, ``memory_share``, ``batch``, the ``host_bytes`` of their plans for
    a node of their own, and the PCIe ``root`` of their GPU; and ``beside``, the ``option`` and ``root`` of those that
    run. The answer has a `Way` for each starting job in ``ways``, and in ``tokens_per_s`` what it reaches beside the
    others; neither has anything where plans made together do not fit, so that those made alone have to do.
    """
    profile, node = HardwareProfile.model_validate(asked["profile"]), node_of(asked["node"])
    starting = [_starting(job, node, measuring) for job in asked["starting"]]
    joint = plan_together(
        [job.on for job in starting],
        [profile] * len(starting),
        node,
        [job["root"] for job in asked["starting"]],
        neighbours_of(asked["beside"]),
    )
    if not joint.feasible:
        return {"ways": [], "tokens_per_s": []}
    ways = [job.way(node.kind, profile, planned) for job, planned in zip(starting, joint.planned, strict=True)]
    return {"ways": [way.model_dump(mode="json") for way in ways], "tokens_per_s": list(joint.tokens_per_s)}


def neighbours_of(beside: Sequence[Mapping[str, Any]]) -> list[Neighbour]:
    """Jobs that run on the node, from JSON values."""
    return [(Option(**job["option"]), job["root"]) for job in beside]


def _starting(job: Mapping[str, Any], node: NodeState, measuring: Measuring) -> _Starting:
    order = AdmissionOrder(
        job="", spec=job["spec"], profiles={}, cache=job["cache"], memory_share=job["memory_share"], batch=job["batch"]
    )
    spec = JobSpec.model_validate(order.spec)
    plans = JobPlans(spec, order, measuring.rows(spec, order.cache), measuring)
    part = node.host_bytes // max(1, len(node.gpus))
    return _Starting(plans, job["batch"], part if job["host_bytes"] <= part else node.host_bytes)


def node_of(fields: Mapping[str, Any]) -> NodeState:
    """The node from JSON values."""
    state = NodeState(**{**fields, "gpus": ()})
    return replace(state, gpus=tuple(Gpu(**gpu) for gpu in fields["gpus"]))
