"""What a job's search of its batch found, taken into its record: it is never searched again."""

from __future__ import annotations

from typing import Any

from ..admission import STAGE, Admission, Way
from ..artifacts import JobFiles, read_json
from ..store import Job, Node
from .admission import LESS
from .desk import Desk


def wants_search(desk: Desk, job: Job) -> bool:
    """Whether the job leaves its batch open and nobody has measured it; preference pairs are not measured."""
    train = job.spec.get("train", {})
    open_ended = train.get("batch", "auto") == "auto" and train.get("objective", "sft") == "sft"
    if not desk.config.search_batch or not open_ended or job.outcome.get("step"):
        return False
    return "trials" not in (desk.store.jobs.stages(job.id).get("batch") or {})


def search_for(job: Job, node: Node) -> dict[str, Any]:
    """What the run's order says about it."""
    return {"profile": dict(node.profile), "kind": node.kind, "memory_share": LESS**job.replans}


def take_in(desk: Desk, job: Job) -> bool:
    """Freeze what was found, if that was not done; whether there was anything.

    Plans for other kinds of node are for another batch: they are made again when the job needs a place once more.
    """
    stages = desk.store.jobs.stages(job.id)
    if "trials" in (stages.get("batch") or {}) or STAGE not in stages:
        return False
    found = read_json(JobFiles(job.run_dir).batch)
    if found is None or not JobFiles(job.run_dir).belongs_to(job.id):
        return False
    plan = Admission.model_validate(stages[STAGE])
    way = Way.model_validate(found["way"])
    changed = plan.model_copy(
        update={"batch": found["batch"], "steps": found["steps"], "ways": {found["kind"]: way}, "limits": {}}
    )
    now = desk.clock()
    frozen = {name: found[name] for name in ("batch", "steps", "kind", "trials")}
    # The plan first: if this is cut off in between, it is done again.
    desk.store.jobs.finish_stage(job, STAGE, changed.model_dump(mode="json"), now, desk.lease, again=True)
    desk.store.jobs.finish_stage(job, "batch", frozen, now, desk.lease, again=True)
    return True
