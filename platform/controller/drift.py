"""A run whose machine is not as fast as planned is given another policy, which it takes up at the end of a step."""

from __future__ import annotations

import logging
from typing import Any

from ...jobs.errors import LazytrainError
from .. import admission
from ..admission import Admission, Answer, Beside, Question, Way
from ..artifacts import JobFiles, write_json
from ..cluster.runs import Look
from ..store import Job
from .desk import Desk
from .drifts import CALIBRATED, PREFIX

log = logging.getLogger(__name__)


def adapt(desk: Desk, job: Job, claim: str, look: Look) -> None:
    """Ask planning about the steps that the run records once in a while; give it the policy that comes of it."""
    drifts = desk.notes.drifts
    answer = drifts.answers.pop(claim, None)
    if answer is not None:
        drifts.asked.discard(claim)
        _take_up(desk, job, claim, answer)
    recorded = _recorded_at(desk, job)
    if recorded is None or recorded == drifts.seen.get(claim) or claim in drifts.asked or ends_soon(look):
        return
    drifts.seen[claim] = recorded
    values = values_of(desk, job, claim)
    if values is not None:
        drifts.asked.add(claim)
        desk.planner.submit(Question(job=PREFIX + claim, kind="drift", values=values, priority=0))


def ends_soon(look: Look) -> bool:
    """Whether a run is not worth another plan."""
    return admission.ends_soon(look.total_steps - look.step, look.step_s)


def _recorded_at(desk: Desk, job: Job) -> float | None:
    """When this run recorded steps last; None before it did."""
    try:
        at = JobFiles(job.run_dir).steps.stat().st_mtime
    except OSError:
        return None
    return at if at > (job.started_at or desk.clock()) else None


def values_of(desk: Desk, job: Job, claim: str) -> dict[str, Any] | None:
    """What planning has to know of a run; None for one whose plan or node is not known."""
    node = {node.name: node for node in desk.store.nodes.list()}.get(job.node or "")
    plan = desk.plans([job]).get(job.id)
    way = plan.way(node.kind, claim) if plan is not None and node is not None else None
    if node is None or way is None:
        return None
    return {
        "spec": dict(job.spec),
        "policy": way.policy,
        "profile": dict(node.profile),
        "gpu_bytes": way.device.get("memory_bytes") or (way.policy.get("predicted") or {}).get("peak_gpu_bytes"),
        "steps": str(JobFiles(job.run_dir).steps),
    }


def _take_up(desk: Desk, job: Job, claim: str, answer: Answer | LazytrainError) -> None:
    plan = desk.plans([job]).get(job.id)
    if isinstance(answer, LazytrainError):
        log.warning("job %s is not planned for what it measured: %s", job.id, answer)
        return
    values = answer.values
    job = _calibrated(desk, job, values.get("calibration"))
    policy, words = values["policy"], values["words"]
    if words:
        log.info("job %s: %s", job.id, words)
    if policy is None or plan is None:
        return
    kind = next(node.kind for node in desk.store.nodes.list() if node.name == job.node)
    asks = values.get("option", {"tokens_per_s": values["tokens_per_s"]})
    desk.write_plan(job, _with_policy(plan, kind, claim, policy, asks, for_company="option" in values))
    desk.runner.switch(claim, JobFiles(job.run_dir).path, policy)
    desk.tell(job, "replanned", f"trains on {job.node} by a new plan; {words}")


def _calibrated(desk: Desk, job: Job, calibration: dict[str, Any] | None) -> Job:
    """Keep beside the run how far off its prediction was and is; the first time it is an event, too."""
    if calibration is None:
        return job
    path = JobFiles(job.run_dir).calibration
    first = not path.exists()
    try:
        write_json(path, calibration)
    except OSError as error:  # a full disk must not keep the run from a better policy
        log.warning("job %s: %s was not written: %s", job.id, path.name, error)
    return desk.tell(job, CALIBRATED, f"trains on {job.node}; {calibration['sentence']}") if first else job


def _with_policy(
    plan: Admission, kind: str, claim: str, policy: dict[str, Any], asks: dict[str, Any], *, for_company: bool
) -> Admission:
    """The plan with this policy and what it asks of the node; one for the company that the run has is for that run."""
    way = plan.way(kind, claim)
    assert way is not None, "the run goes by it"
    changed = Way(option={**way.option, **asks}, policy=policy, device=way.device)
    if for_company or (plan.beside is not None and plan.beside.claim == claim):
        return plan.model_copy(update={"beside": Beside(claim=claim, way=changed)})
    return plan.model_copy(update={"ways": {**plan.ways, kind: changed}})
