"""What a job's search of its batch found, taken into its record: it is never searched again."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ...jobs.frozen import Frozen
from ..admission import Way
from ..artifacts import JobFiles, read_record
from ..store import Job, Node
from .admission import LESS
from .desk import Desk


class Found(Frozen):
    """What `searching.answer` has left."""

    batch: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=1)]
    kind: str
    way: Way
    trials: list[dict[str, Any]]


def wants_search(desk: Desk, job: Job, seconds: float) -> bool:
    """Whether the job measures its batch first, on the GPU that it gets: where it leaves its batch open, nobody has
    measured it, and it would train for much longer than measuring takes.

    Preference pairs are not measured. A job that has failed before goes by the plan's batch: it shall not fail for a
    measurement once more.
    """
    train = job.spec.get("train", {})
    open_ended = train.get("batch", "auto") == "auto" and train.get("objective", "sft") == "sft"
    worth_it = desk.config.search_batch and seconds >= desk.config.search_from_s
    if not (open_ended and worth_it) or job.outcome.get("step") or job.infra_failures or job.user_failures:
        return False
    return "trials" not in (desk.store.jobs.stages(job.id).get("batch") or {})


def search_for(job: Job, node: Node) -> dict[str, Any]:
    """What the run's order says about it."""
    return {"profile": dict(node.profile), "kind": node.kind, "memory_share": LESS**job.replans}


def take_in(desk: Desk, job: Job) -> bool:
    """Freeze what was found, if that was not done; whether there was anything.

    Plans for other kinds of node are for another batch: they are made again when the job needs a place once more.
    """
    plan = desk.plans([job]).get(job.id)
    if plan is None or "trials" in (desk.store.jobs.stages(job.id).get("batch") or {}):
        return False
    found = read_record(Found, JobFiles(job.run_dir).batch)
    if found is None or not JobFiles(job.run_dir).belongs_to(job.id):
        return False
    changed = plan.model_copy(
        update={
            "batch": found.batch,
            "steps": found.steps,
            "ways": {found.kind: found.way},
            "limits": {},
            "beside": None,
        }
    )
    now = desk.clock()
    frozen = found.model_dump(mode="json", exclude={"way"})
    # The plan first: if this is cut off in between, it is done again.
    desk.write_plan(job, changed)
    desk.store.jobs.finish_stage(job, "batch", frozen, now, desk.lease, again=True)
    return True
