"""The overview: figures of the lab and what needs somebody."""

import time
from collections.abc import Sequence
from typing import Any

from lazytrain.dashboards.pages.overview import kinds_of, notices
from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.schemas import Health, JobView, NodeView, Progress, QueueEntry, QueueView

Lab = Any
EMPTY = QueueView(waiting=[], running=[])


def node(name: str, **changes: Any) -> NodeView:
    values = {"address": "x", "kind": "H800", "device": "cuda", "cpus": 8, "gpus": 4, "alive": True, "drained": False}
    more = {"reason": "", "faults": 0, "seen_at": 0.0, "measured": True, "busy": 0}
    return NodeView(name=name, **{**values, **more, **changes})


def health(leader: str | None = "me") -> Health:
    return Health(status="ok", version="1", database="sqlite", leader=leader, nodes=1, jobs={})


def said(
    nodes: Sequence[NodeView] = (),
    queue: QueueView = EMPTY,
    ended: Sequence[JobView] = (),
    of: Health | None = None,
) -> list[str]:
    return [f"{notice.tone}: {notice.text}" for notice in notices(of or health(), nodes, queue, ended, 1e9)]


def test_gpus_by_kind_are_free_at_work_or_away() -> None:
    kinds = kinds_of(
        [node("a", busy=1), node("b", drained=True, busy=1), node("c", kind="RTX3090", alive=False), node("d", gpus=0)]
    )
    assert [(kind.name, kind.gpus, kind.used, kind.away) for kind in kinds] == [("H800", 8, 2, 3), ("RTX3090", 4, 0, 4)]


def test_all_is_well() -> None:
    assert said([node("a", busy=4)]) == []


def test_what_needs_attention_on_nodes() -> None:
    found = said(
        [
            node("lost", alive=False),
            node("out", drained=True, reason="new disk"),
            node("new", measured=False),
            node("hot", faults=2),
        ],
        of=health(None),
    )
    assert found == [
        "bad: No controller leads: nothing is started or ended until one does.",
        "bad: Node lost is not there any more.",
        "warn: Node out takes no new jobs: new disk.",
        "warn: Node new waits to be measured.",
        "bad: Node hot had 2 GPU or disk faults.",
    ]


def entry(state: str, reason: str = "", **progress: float) -> QueueEntry:
    return QueueEntry(
        id="j-0123456789",
        user="ada",
        name="tiny",
        state=state,
        priority=50,
        reason=reason,
        sentence="because",
        queued_at=0.0,
        progress=Progress(**progress) if progress else None,  # type: ignore[arg-type]
    )


def test_what_needs_attention_among_jobs() -> None:
    queue = QueueView(
        waiting=[entry("QUEUED", "gpu_busy"), entry("QUEUED", "too_large")],
        running=[
            entry("RECOVERING"),
            entry("RUNNING", step_s=0.5, predicted_step_s=0.4),
            entry("RUNNING", step_s=1.0, predicted_step_s=0.4),
        ],
    )
    assert said(queue=queue) == [
        "warn: tiny: because",
        "warn: tiny takes 2.5 times the predicted time for a step.",
        "warn: tiny cannot start: because",
    ]


def test_somebody_elses_job_is_not_talked_about() -> None:
    hidden = entry("QUEUED", "too_large").model_copy(update={"id": None})
    assert said(queue=QueueView(waiting=[hidden], running=[])) == []


def test_failures_of_the_last_day_are_named(lab: Lab) -> None:
    lab.job("old", JobState.FAILED, sentence="long ago", at=1e9)
    lab.job("new", JobState.FAILED, sentence="out of memory", at=time.time() - 60)
    text = lab.browser().get("/").text
    assert "new failed: out of memory" in text
    assert "long ago" not in text


def test_the_page_shows_the_lab(lab: Lab) -> None:
    lab.node()
    for name in ("one", "two"):
        job = lab.job(name, JobState.RUNNING)
        lab.admit(job, host_bytes=100 << 30, nvme_bytes=1 << 40)
        lab.train(job)
    lab.job("waits")
    text = lab.browser().get("/").text
    assert "0 of 2" in text  # GPUs free
    assert "200 GiB" in text  # host memory that is held
    assert "15,9" in text or "16," in text  # tokens/s of both
    assert "step 20 of 100" in text


def test_a_user_sees_how_full_the_lab_is_but_not_with_what(lab: Lab) -> None:
    lab.node()
    lab.train(lab.job("secret-project", JobState.RUNNING, user="ben"))
    text = lab.browser("ada").get("/").text
    assert "1 of 2" in text
    assert "secret-project" not in text
    assert "secret-project" in lab.browser("vic").get("/").text
