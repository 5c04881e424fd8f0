"""Finding out for each new job whether and how it can run on the nodes that there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...jobs.errors import LazytrainError, NotFound, Unreachable
from ...jobs.lifecycle import JobState
from ...schedulers.hardware import same_gpu
from ..admission import STAGE, Admission, AdmissionOrder, Answer
from ..artifacts import JobFiles
from ..store import Job
from .desk import Desk
from .words import rejection_sentence

LESS = 0.85
"""Part of each memory that is planned with after a run was out of memory."""


def admit(desk: Desk) -> None:
    """Take in what planning has found, and have planned what is not."""
    # The controller plans jobs alone; other questions are the API's.
    results = {name: found for name, found in desk.planner.results().items() if not isinstance(found, Answer)}
    queued = desk.store.jobs.list(states=[JobState.QUEUED])
    desk.for_each([job for job in queued if job.id in results], lambda job: _take_in(desk, job, results[job.id]))
    profiles, gpus = _profiles(desk)
    plans = desk.store.jobs.stages_of((job.id for job in queued), STAGE)
    waiting = [job for job in reversed(queued) if job.id not in results]
    desk.for_each(waiting, lambda job: _have_planned(desk, job, profiles, gpus, plans.get(job.id)))


def _profiles(desk: Desk) -> tuple[dict[str, Mapping[str, Any]], dict[str, int]]:
    """One measured profile for each kind of node, and how many GPUs share its memory; of several nodes, those of the
    one with the least host memory."""
    found: dict[str, Mapping[str, Any]] = {}
    gpus: dict[str, int] = {}
    for node in desk.store.nodes.list():
        if node.profile and node.alive:
            known = found.get(node.kind)
            if known is None or node.profile["host_memory_bytes"] < known["host_memory_bytes"]:
                found[node.kind], gpus[node.kind] = node.profile, max(1, int(node.gpus))
    return found, gpus


def _have_planned(
    desk: Desk, job: Job, profiles: Mapping[str, Any], gpus: Mapping[str, int], plan: Mapping[str, Any] | None
) -> None:
    known = Admission.model_validate(plan) if plan is not None else None
    missing = {
        kind: profile
        for kind, profile in profiles.items()
        if may_run_on(job, kind) and (known is None or kind not in {**known.ways, **known.limits})
    }
    if not missing:
        if known is None:
            desk.tell(job, "no_node", _no_node(job, bool(profiles)))
        return
    try:
        files = JobFiles(job.run_dir)
        files.claim(job.id)
        if job.continues is not None:
            job = _continue(desk, job, files, job.continues)
    except LazytrainError as error:
        _reject(desk, job, error)
        return
    desk.planner.submit(
        AdmissionOrder(
            job=job.id,
            spec=job.spec,
            profiles=missing,
            gpus={kind: gpus[kind] for kind in missing},
            cache=str(JobFiles(job.run_dir).path / "rows"),
            memory_share=LESS**job.replans,
            batch=_fixed_batch(desk, job),
            priority=job.priority,
        )
    )


def _continue(desk: Desk, job: Job, files: JobFiles, before: str) -> Job:
    """Go on from the last checkpoint of another job, with the batch that was fixed for it."""
    try:
        other = desk.store.jobs.get(before)
    except NotFound:
        return job
    theirs = JobFiles(other.run_dir)
    step = files.continue_from(theirs) if theirs.belongs_to(other.id) else None
    if step is None or job.outcome:
        return job
    batch = desk.store.jobs.stages(other.id).get("batch")
    if batch is not None:
        desk.store.jobs.finish_stage(job, "batch", batch, desk.clock(), desk.lease)
    words = f"goes on from step {step} of job {other.id}"
    return desk.store.jobs.annotate(job, desk.clock(), desk.lease, outcome={"step": step}, sentence=words)


def may_run_on(job: Job, kind: str) -> bool:
    """Whether the job file allows this kind of GPU."""
    wanted = job.spec.get("resources", {}).get("gpu") or ()
    return not wanted or any(same_gpu(name, kind) for name in wanted)


def _no_node(job: Job, any_node: bool) -> str:
    wanted = job.spec.get("resources", {}).get("gpu") or ()
    if wanted:
        return f"waits for a node with {' or '.join(wanted)}: there is none now"
    return "waits for a node: none is there" if not any_node else "waits for a node that it may run on"


def _fixed_batch(desk: Desk, job: Job) -> int | None:
    batch = desk.store.jobs.stages(job.id).get("batch")
    return int(batch["batch"]) if batch is not None else None


def _take_in(desk: Desk, job: Job, found: Admission | LazytrainError) -> None:
    if isinstance(found, Unreachable):  # nothing is wrong with the job: it is asked again
        desk.tell(job, "no_node", f"waits to be planned: {found.message}")
        return
    if isinstance(found, LazytrainError):
        _reject(desk, job, found)
        return
    known = desk.store.jobs.stages(job.id).get(STAGE)
    if known is not None:
        before = Admission.model_validate(known)
        found = found.model_copy(
            update={"ways": {**before.ways, **found.ways}, "limits": {**before.limits, **found.limits}}
        )
    if not found.ways:
        sentence = rejection_sentence(found.reasons, found.limits)
        desk.move(job, JobState.REJECTED, "does_not_fit", sentence, outcome={"reasons": list(found.reasons)})
        return
    now = desk.clock()
    desk.store.jobs.finish_stage(job, "batch", {"batch": found.batch, "steps": found.steps}, now, desk.lease)
    desk.store.jobs.finish_stage(job, STAGE, found.model_dump(mode="json"), now, desk.lease, again=True)
    if job.reason == "admission":
        desk.tell(job, "planned", "is planned and waits for its turn")


def _reject(desk: Desk, job: Job, error: LazytrainError) -> None:
    reasons = [dict(reason) for reason in getattr(error, "reasons", ())]
    sentence = f"{error.message}; {error.hint}" if error.hint else error.message
    desk.move(job, JobState.REJECTED, error.code, sentence, outcome={**error.to_dict(), "reasons": reasons})
