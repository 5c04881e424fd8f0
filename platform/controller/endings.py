"""What becomes of a job when its run has ended, in whatever way."""

from __future__ import annotations

import math
from typing import Any

from ...jobs.errors import NotFound
from ...jobs.lifecycle import JobState
from ..artifacts import JobFiles, read_json
from ..cluster.runs import Outcome
from ..store import Job
from .desk import MOVING, PREEMPTED, RESUMING, Desk
from .failures import Failure, Tally, Verdict, bad_after, classify, judge
from .pausing import spilled
from .searched import take_in
from .words import failure_sentence

_S = JobState
_IN_A_CHECKPOINT = "paused; its state is in a checkpoint"


def settle(desk: Desk, job: Job, outcome: Outcome) -> None:
    """Move a job whose run has ended and left ``outcome``."""
    if job.claim not in desk.notes.searched:
        take_in(desk, job)
    if outcome.how == "done" and job.state not in (_S.RECOVERING, _S.PAUSED):
        problem = unverified(job, outcome)
        if problem is None:
            _succeed(desk, job, outcome)
            return
        outcome = outcome.model_copy(update={"how": "error", "message": problem})
    if job.state is _S.STOPPING:
        desk.move(job, _S.STOPPED, "stopped", "stopped as asked", outcome=_record(outcome), claim=None)
    elif job.state is _S.PAUSED:
        spilled(desk, job, _record(outcome), saved=outcome.how == "stopped")
    elif job.state is _S.PAUSING and (outcome.how == "stopped" or job.claim in desk.notes.killed):
        _pause(desk, job, outcome)
    elif job.state is _S.RECOVERING:
        requeue(desk, job)
    elif job.reason == RESUMING and outcome.how == "stopped":
        words = "its GPU was not to be had after the pause: it waits to go on from its checkpoint"
        desk.move(job, _S.QUEUED, "planned", words, outcome=_record(outcome), claim=None, gpu=None)
    elif outcome.how == "stopped" and _has_time_limit(job):
        _time_is_up(desk, job, outcome)
    else:
        fail(desk, job, Failure.KILLED if outcome.how == "stopped" else classify(outcome), outcome)


def unverified(job: Job, outcome: Outcome) -> str | None:
    """What is missing for the job to count as done; None when its result record and its model are there."""
    files = JobFiles(job.run_dir)
    record = read_json(files.result)
    if record is None:
        return f"the run said it was done, but there is no result record {files.result}"
    if not files.belongs_to(job.id):
        return f"the run said it was done, but {files.path} does not belong to it"
    if record.get("status") != "done" or record != outcome.result:
        return f"the run said it was done, but its result record {files.result} says something else"
    loss = record.get("loss")
    if not record.get("steps") or not isinstance(loss, int | float) or not math.isfinite(loss):
        return f"the run trained nothing: {record.get('steps')} steps, loss {loss}"
    if not any(files.model.glob("*.safetensors")):
        return f"the run said it was done, but there is no model in {files.model}"
    return None


def fail(desk: Desk, job: Job, failure: Failure, outcome: Outcome) -> None:
    """Start the job again if its failure and its history allow it, else end it."""
    verdict = judge(failure, _tally(job))
    changes = _counted(job, verdict)
    sentence = failure_sentence(failure, outcome, verdict, job.node or "")
    record = _record(outcome)
    if verdict.other_node and job.node:
        _count_fault(desk, job.node, outcome)
        changes["avoid"] = tuple({*job.avoid, job.node})
    if not verdict.again:
        desk.move(job, _S.FAILED, failure.value, sentence, outcome=record, claim=None, **changes)
        return
    if verdict.replan:
        desk.store.jobs.forget_stage(job, "plan", desk.lease)
    not_before = desk.clock() + verdict.pause_s
    if outcome.how == "died" and desk.config.mlflow_uri:
        desk.config.tell_lost(job.run_dir)
    desk.move(job, _S.RECOVERING, failure.value, sentence, outcome=record, not_before=not_before, **changes)


def requeue(desk: Desk, job: Job) -> None:
    """Put a job back into the queue of which nothing lives any more; why it is there stays as it was."""
    desk.move(job, _S.QUEUED, job.reason, job.sentence, claim=None, gpu=None)


def lost(desk: Desk, job: Job) -> None:
    """Move a job whose run cannot be found any more."""
    gone = Outcome(how="died", message=f"the run on {job.node} vanished without a word", node=job.node or "")
    if job.state is _S.STOPPING:
        desk.move(job, _S.STOPPED, "stopped", "stopped as asked", claim=None)
    elif job.state is _S.RECOVERING:
        requeue(desk, job)
    elif job.state is _S.PAUSED:
        spilled(desk, job, {**job.outcome, **_record(gone), "step": 0}, saved=False)
    else:
        fail(desk, job, Failure.NODE_LOST, gone)


def _succeed(desk: Desk, job: Job, outcome: Outcome) -> None:
    if job.state is _S.STARTING:  # it was faster than we looked
        job = desk.move(job, _S.RUNNING, "running", f"trains on {job.node}", started_at=desk.clock())
    result = outcome.result
    sentence = f"done after {result['steps']} steps, last loss {result['loss']:.4g}"
    desk.move(job, _S.SUCCEEDED, "done", sentence, outcome=_record(outcome), claim=None)


def _pause(desk: Desk, job: Job, outcome: Outcome) -> None:
    comes_back = job.reason in (PREEMPTED, MOVING)
    reason, words = (job.reason, job.sentence) if comes_back else ("paused", _IN_A_CHECKPOINT)
    paused = desk.move(job, _S.PAUSED, reason, words, outcome=_record(outcome), claim=None, gpu=None)
    if comes_back:
        times = job.preemptions + (job.reason == PREEMPTED)
        desk.move(paused, _S.QUEUED, job.reason, job.sentence, preemptions=times)


def _has_time_limit(job: Job) -> bool:
    return job.spec.get("queue", {}).get("max_duration") is not None


def _time_is_up(desk: Desk, job: Job, outcome: Outcome) -> None:
    limit = job.spec["queue"]["max_duration"]
    sentence = (
        f"ended after its time limit of {limit:g} s, at step {outcome.step}; its last checkpoint is kept: "
        "raise queue.max_duration and submit again"
    )
    desk.move(job, _S.FAILED, "time_limit", sentence, outcome=_record(outcome), claim=None)


def _tally(job: Job) -> Tally:
    retries = int(job.spec.get("queue", {}).get("retries", 2))
    return Tally(job.infra_failures, job.user_failures, job.replans, retries)


def _counted(job: Job, verdict: Verdict) -> dict[str, Any]:
    if not verdict.counts:
        return {}
    if verdict.replan:
        return {"replans": job.replans + 1}
    if verdict.infra:
        return {"infra_failures": job.infra_failures + 1}
    return {"user_failures": job.user_failures + 1}


def _count_fault(desk: Desk, node: str, outcome: Outcome) -> None:
    try:
        faults = desk.store.nodes.add_fault(node)
    except NotFound:  # a node that was forgotten has no record to count in
        return
    if bad_after(faults):
        first = outcome.message.splitlines()[0] if outcome.message else "unknown"
        desk.store.nodes.drain(node, True, f"{faults} GPU or disk faults, the last: {first}")


def _record(outcome: Outcome) -> dict[str, Any]:
    return outcome.model_dump(mode="json")
