"""From answers to facts: what is drawn is what was answered, and what is not there is left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from lazytrain.jobs.errors import NotFound
from lazytrain.jobs.policy import Boundary, LayerPolicy, Policy
from lazytrain.jobs.timeline import Span, Timeline
from lazytrain.platform import facts
from lazytrain.platform.schemas import (
    JobView,
    NodeView,
    Progress,
    QueueEntry,
    QueueView,
    SeriesAnswer,
    SeriesView,
)


@dataclass
class Answers:
    """A client that knows what it is given."""

    series_of: dict[str, dict[str, SeriesView]] = field(default_factory=dict)
    policies: dict[str, Policy] = field(default_factory=dict)
    timelines: dict[tuple[str, bool], Timeline] = field(default_factory=dict)

    def series(self, job_id: str, names: Any, *, points: int = 400) -> SeriesAnswer:
        known = self.series_of[job_id]
        return SeriesAnswer(series={name: known[name] for name in names if name in known})

    def policy(self, job_id: str) -> Policy:
        if job_id not in self.policies:
            raise NotFound("no policy")
        return self.policies[job_id]

    def timeline(self, job_id: str, *, predicted: bool = False) -> Timeline:
        if (job_id, predicted) not in self.timelines:
            raise NotFound("no timeline")
        return self.timelines[job_id, predicted]


def view(*values: float | None, count: int = 0) -> SeriesView:
    return SeriesView(steps=list(range(1, len(values) + 1)), values=list(values), count=count or len(values))


def test_runs_lie_over_each_other() -> None:
    client: Any = Answers({"a": {"loss": view(2.0, None, 1.0, count=3000)}, "b": {"loss": view(3.0), "x": view(1.0)}})
    plots = facts.run_series(client, {"a": "first", "b": "second"}, ["loss", "x", "absent"])
    assert [line.label for line in plots["loss"].lines] == ["first", "second"]
    assert plots["loss"].lines[0].values == (2.0, None, 1.0) and plots["loss"].lines[0].count == 3000
    assert plots["loss"].title == "Loss" and plots["x"].title == "x"
    assert [line.label for line in plots["x"].lines] == ["second"] and plots["absent"].lines == ()


@pytest.mark.parametrize(
    ("measured", "predicted", "words"),
    [
        (view(1.0, 1.2, 1.1), view(1.0, 1.0, 1.0), "10.0% more time than predicted"),
        (view(0.9), view(1.0), "10.0% less time than predicted"),
        (view(0.9), None, "Nothing was predicted"),
        (None, None, "No step has been measured"),
        (view(None, None), view(1.0), "No step has been measured"),
    ],
)
def test_steps_against_their_prediction(measured: Any, predicted: Any, words: str) -> None:
    known = {"step_s": measured, "predicted_step_s": predicted}
    client: Any = Answers({"a": {name: found for name, found in known.items() if found is not None}})
    times = facts.step_times(client, "a")
    assert words in times.words
    assert [line.label for line in times.plot.lines] == [
        label for label, found in (("measured", measured), ("predicted", predicted)) if found is not None
    ]


def test_map_and_timelines_are_there_when_they_are_there() -> None:
    policy = Policy(
        model_digest="m", micro_batch=1, sequence_length=2, layers=(LayerPolicy(index=0),),
        boundaries=(Boundary(index=0, home="host"), Boundary(index=1, home="gpu")),
    )  # fmt: skip
    measured = Timeline([Span("loss", "compute", 0.0, 1.0)], 1.0)
    client: Any = Answers(policies={"a": policy}, timelines={("a", False): measured})
    found = facts.job_map(client, "a")
    assert found is not None and [tile.kind for tile in found.boundaries] == ["host", "gpu"]
    assert facts.job_map(client, "b") is None
    predicted, shown = facts.job_timelines(client, "a")
    assert predicted is None and shown is not None and shown.step_s == 1.0
    assert facts.timeline_of(measured.to_dict()) == shown and facts.timeline_of(None) is None


def entry(name: str | None, state: str, **times: Any) -> QueueEntry:
    fields = {"id": "j-1", "user": "ada", "priority": 5, "reason": "", "sentence": "", "queued_at": 0.0}
    return QueueEntry(**{**fields, "name": name, "state": state, **times})


def test_the_queue_in_seconds_from_now() -> None:
    queue = QueueView(
        running=[entry("runs", "RUNNING", started_at=900.0, expected_end=1500.0, node="a"), entry("mute", "RUNNING")],
        waiting=[
            entry("later", "QUEUED", expected_start=1600.0, expected_end=1900.0),
            entry("never", "QUEUED"),
            entry("overdue", "QUEUED", expected_start=990.0, expected_end=995.0),
        ],
    )
    plot = facts.queue_facts(queue, 1000.0)
    assert [(bar.label, bar.start_s, bar.end_s, bar.running, bar.where) for bar in plot.bars] == [
        ("runs", -100.0, 500.0, True, "a"),
        ("overdue", 0.0, 1.0, False, ""),
        ("later", 600.0, 900.0, False, ""),
    ]
    assert plot.unknown == 2


def node(name: str, **changes: Any) -> NodeView:
    fields = {
        "address": "", "kind": "H800", "device": "cuda", "cpus": 8, "gpus": 4, "alive": True, "drained": False,
        "reason": "", "faults": 0, "seen_at": 0.0, "measured": True,
        "profile": {"host_memory_bytes": 1000, "nvme_bytes": 0, "gpu_memory_bytes": 80},
    }  # fmt: skip
    return NodeView(**{**fields, "name": name, **changes})


def test_use_of_a_node_and_of_the_lab() -> None:
    busy = node("a", busy=3, held_host_bytes=250, jobs=["j-1"])
    gone = node("b", alive=False)
    job = JobView(
        id="j-1", name="one", user="ada", state="RUNNING", reason="", sentence="", priority=1, created_at=0.0,
        queued_at=0.0, run_dir="", progress=Progress(gpu_bytes=60.0),
    )  # fmt: skip
    bars = facts.node_usage(busy, [job])
    assert [(bar.label, bar.used, bar.total) for bar in bars] == [
        ("GPUs", 3, 4), ("host memory", 250, 1000), ("GPU: one", 60.0, 80),
    ]  # fmt: skip
    lab = facts.lab_usage([busy, gone, node("c", kind="RTX3090", profile={})])
    assert [(bar.label, bar.used, bar.total) for bar in lab] == [
        ("H800", 3, 4), ("RTX3090", 0, 4), ("host memory", 250, 1000),
    ]  # fmt: skip
