"""Finding out for each new job whether and how it can run on the nodes that there are."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from ...jobs.errors import LazytrainError, NotFound, Unreachable
from ...jobs.frozen import digest
from ...jobs.lifecycle import JobState
from ...schedulers.hardware import same_gpu
from ..admission import Admission, AdmissionOrder, Answer
from ..artifacts import JobFiles
from ..store import Job
from .desk import AT_ONCE_S, Desk
from .failures import disk_is_full
from .words import rejection_sentence

AGAIN_S = 30.0
"""A job that could not be planned for no fault of its own is planned again after this time."""
LESS = 0.85
"""Part of each memory that is planned with after a run was out of memory."""


def admit(desk: Desk) -> None:
    """Take in what planning has found, and have planned what is not."""
    everything = desk.planner.results()
    desk.notes.meetings.take(everything)
    desk.notes.drifts.take(everything)
    answers = {name: found for name, found in everything.items() if not isinstance(found, Answer)}
    queued = {job.id: job for job in reversed(desk.store.jobs.list(states=[JobState.QUEUED]))}
    found = {name: answer for name, answer in {**desk.notes.found, **answers}.items() if name in queued}
    waiting = {name: job for name, job in queued.items() if name not in found}
    desk.notes.found = found
    desk.notes.ordered = {name: order for name, order in desk.notes.ordered.items() if name in waiting}
    answered = [queued[name] for name in found]
    desk.for_each(answered, lambda job: _take_in(desk, job, found.pop(job.id)), within_s=AT_ONCE_S)
    profiles, gpus = _profiles(desk)
    plans = desk.plans(waiting.values())
    todo: dict[str, _Unplanned] = {}
    desk.notes.put_off = {name: at for name, at in desk.notes.put_off.items() if name in queued and at > desk.steady()}
    for job in waiting.values():
        if job.id in desk.notes.put_off:
            continue
        new = _Unplanned(job, _missing(job, profiles, plans.get(job.id)), gpus)
        if (new.profiles or job.id not in plans) and desk.notes.ordered.get(job.id) != new.asked:
            todo[job.id] = new
    desk.for_each([waiting[name] for name in todo], lambda job: _have_planned(desk, todo[job.id]), within_s=AT_ONCE_S)


@dataclass(frozen=True)
class _Unplanned:
    """A job that has no plan yet for some kinds of node."""

    job: Job
    profiles: Mapping[str, Mapping[str, Any]]
    """Of the kinds that it has none for and may run on."""
    gpus: Mapping[str, int]

    @property
    def asked(self) -> Hashable:
        """What planning is asked about it."""
        machines = tuple((kind, self.gpus[kind], digest(self.profiles[kind])) for kind in sorted(self.profiles))
        return self.job.priority, self.job.replans, bool(self.gpus), machines


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


def _missing(job: Job, profiles: Mapping[str, Any], known: Admission | None) -> dict[str, Any]:
    found = {**known.ways, **known.limits} if known is not None else {}
    return {kind: profile for kind, profile in profiles.items() if may_run_on(job, kind) and kind not in found}


def _have_planned(desk: Desk, unplanned: _Unplanned) -> None:
    job = unplanned.job
    if not unplanned.profiles:
        desk.tell(job, "no_node", _no_node(job, bool(unplanned.gpus)))
        desk.notes.ordered[job.id] = unplanned.asked
        return
    try:
        files = JobFiles(job.run_dir)
        files.claim(job.id)
        if job.continues is not None:
            job = _continue(desk, job, files, job.continues)
    except Unreachable as error:
        _put_off(desk, job, "no_disk", error)
        return
    except LazytrainError as error:
        _reject(desk, job, error)
        return
    desk.planner.submit(
        AdmissionOrder(
            job=job.id,
            spec=job.spec,
            profiles=unplanned.profiles,
            gpus={kind: unplanned.gpus[kind] for kind in unplanned.profiles},
            cache=str(JobFiles(job.run_dir).path / "rows"),
            memory_share=LESS**job.replans,
            batch=_fixed_batch(desk, job),
            priority=job.priority,
            user=job.user,
        )
    )
    desk.notes.ordered[job.id] = unplanned.asked


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
        _put_off(desk, job, "no_node", found)
        return
    if isinstance(found, LazytrainError) and disk_is_full(found.message):
        _put_off(desk, job, "no_disk", found)
        return
    if isinstance(found, LazytrainError):
        _reject(desk, job, found)
        return
    before = desk.plans([job]).get(job.id)
    if before is not None:
        found = found.model_copy(
            update={"ways": {**before.ways, **found.ways}, "limits": {**before.limits, **found.limits}}
        )
    if not found.ways:
        sentence = rejection_sentence(found.reasons, found.limits)
        desk.move(job, JobState.REJECTED, "does_not_fit", sentence, outcome={"reasons": list(found.reasons)})
        return
    now = desk.clock()
    desk.store.jobs.finish_stage(job, "batch", {"batch": found.batch, "steps": found.steps}, now, desk.lease)
    desk.write_plan(job, found)
    if job.reason == "admission":
        desk.tell(job, "planned", "; ".join(["is planned and waits for its turn", *found.notes]))


def _put_off(desk: Desk, job: Job, reason: str, error: LazytrainError) -> None:
    desk.notes.put_off[job.id] = desk.steady() + AGAIN_S
    desk.tell(job, reason, f"waits to be planned: {error.message}")


def _reject(desk: Desk, job: Job, error: LazytrainError) -> None:
    reasons = [dict(reason) for reason in getattr(error, "reasons", ())]
    sentence = f"{error.message}; {error.hint}" if error.hint else error.message
    desk.move(job, JobState.REJECTED, error.code, sentence, outcome={**error.to_dict(), "reasons": reasons})
