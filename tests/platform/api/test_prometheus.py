"""The service in numbers: what Prometheus reads, and that every board in deploy/grafana asks only for what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.artifacts import JobFiles, write_json
from lazytrain.platform.controller.step_times import StepTimes
from lazytrain.platform.store import Lease, Move, NewJob, Node

Service = Any
GRAFANA = Path(__file__).parents[3] / "deploy" / "grafana"


def add(service: Service, number: int) -> Any:
    job_id = f"j-{number:010x}"
    run_dir = str(service.folder / job_id)
    new = NewJob(id=job_id, user="ada", name="<b>", spec={}, run_dir=run_dir, priority=50)
    return service.store.jobs.create(new, 100.0 + number)[0]


def move(service: Service, job: Any, lease: Lease, to: JobState, reason: str, **changes: Any) -> Any:
    return service.store.jobs.move(job, Move(to, reason, ""), 200.0, lease, **changes)


@pytest.fixture
def lab(service: Service) -> Service:
    """One job waits, one runs, two have failed; two nodes of one kind, one of another that is gone."""
    lease = service.store.leases.take("controller", "me", 0.0, 1e12)
    nodes = [
        Node(name=name, address="x", kind=kind, device="cuda", cpus=8, gpus=gpus, alive=True)
        for name, kind, gpus in (("a", "H800", 8), ("b", "H800", 4), ("c", "RTX3090", 2))
    ]
    service.store.nodes.see(nodes, 1.0)
    service.store.nodes.see(nodes[:2], 10.0)
    service.store.nodes.set_profile("a", {"host_memory_bytes": 1000, "nvme_bytes": 5000})
    add(service, 1)
    running = move(service, add(service, 2), lease, JobState.STARTING, "starting", node="a", claim="run", attempt=1)
    running = move(service, running, lease, JobState.RUNNING, "running")
    plan = {"ways": {"H800": {"option": {"host_bytes": 300, "nvme_bytes": 70}}}}
    service.store.jobs.finish_stage(running, "plan", plan, 1.0, lease)
    files = JobFiles(running.run_dir)
    files.claim(running.id)
    write_json(files.attempt(1).beat, {"beat": 1, "step": 5, "total_steps": 10, "step_s": 0.6})
    files.metrics.write_text('{"step": 5, "loss": 1.0, "tokens_per_s": 1234.5, "predicted_step_s": 0.5}\n')
    for number in (3, 4):
        failed = move(service, add(service, number), lease, JobState.STARTING, "starting", attempt=1)
        move(service, failed, lease, JobState.FAILED, "out_of_memory")
    times = StepTimes(service.settings.step_times_path, clock=lambda: 0.0)
    times.add(0.002)
    times._written_at = float("-inf")
    times.add(3.0)
    return service


def samples(service: Service) -> dict[tuple[str, ...], float]:
    """Value by name and labels."""
    answer = service.client("vic").get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_job_that_was_planned_with_its_neighbours_holds_what_that_plan_takes(lab: Service) -> None:
    lease = lab.store.leases.take("controller", "me", 1.0, 1e12)
    assert lease is not None
    (running,) = lab.store.jobs.list(states=[JobState.RUNNING])
    joint = {"way": {"option": {"host_bytes": 200, "nvme_bytes": 10}}}
    for claim, held in (("another run", 300), (running.claim, 200)):
        plan = {"ways": {"H800": {"option": {"host_bytes": 300}}}, "beside": {"claim": claim, **joint}}
        lab.store.jobs.finish_stage(running, "plan", plan, 1.0, lease, again=True)
        assert samples(lab)["lazytrain_host_memory_held_bytes",] == held


def test_everything_is_counted(lab: Service) -> None:
    found = samples(lab)
    assert found["lazytrain_jobs", "QUEUED"] == 1 and found["lazytrain_jobs", "FAILED"] == 2
    assert found["lazytrain_jobs", "PAUSED"] == 0
    assert found["lazytrain_job_failures_total", "out_of_memory"] == 2
    assert (found["lazytrain_gpus", "H800"], found["lazytrain_gpus_used", "H800"]) == (12, 1)
    assert ("lazytrain_gpus", "RTX3090") not in found
    assert found["lazytrain_nodes", "in_service"] == 2 and found["lazytrain_nodes", "gone"] == 1
    assert (found["lazytrain_host_memory_bytes",], found["lazytrain_host_memory_held_bytes",]) == (1000, 300)
    assert (found["lazytrain_nvme_bytes",], found["lazytrain_nvme_held_bytes",]) == (5000, 70)
    assert found["lazytrain_tokens_per_second",] == 1234.5
    assert found["lazytrain_step_time_over_predicted",] == pytest.approx(1.2)
    assert found["lazytrain_leader",] == 1 and found["lazytrain_longest_wait_seconds",] > 1e6
    assert found["lazytrain_waiting", "admission"] == 1


def test_steps_of_the_controller_are_a_histogram(lab: Service) -> None:
    found = samples(lab)
    assert found["lazytrain_controller_step_seconds_count",] == 2
    assert found["lazytrain_controller_step_seconds_sum",] == pytest.approx(3.002)
    assert found["lazytrain_controller_step_seconds_bucket", "0.005"] == 1
    assert found["lazytrain_controller_step_seconds_bucket", "2.5"] == 1
    assert found["lazytrain_controller_step_seconds_bucket", "5.0"] == 2


def test_nothing_needs_to_be_there(service: Service) -> None:
    found = samples(service)
    assert found["lazytrain_jobs", "RUNNING"] == 0 and found["lazytrain_leader",] == 0


def test_a_token_is_needed_and_no_job_is_named(lab: Service) -> None:
    assert lab.client(None).get("/metrics").status_code == 401
    text = lab.client("ben").get("/metrics").text
    assert "ada" not in text and "j-0000" not in text and "<b>" not in text


@pytest.mark.parametrize("board", sorted(GRAFANA.glob("*.json")), ids=lambda path: path.stem)
def test_boards_ask_for_what_is_there(lab: Service, board: Path) -> None:
    content = json.loads(board.read_text())
    asked = [target["expr"] for panel in content["panels"] for target in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"lazytrain_\w+", expr)}
    assert len(asked) >= 8 and names
    assert names <= {name for name, *_ in samples(lab)}
    states = {state.value for state in JobState}
    assert {
        word for expr in asked for word in re.findall(r'state[=!~]+"([^"]+)"', expr) for word in word.split("|")
    } <= states
    places = [tuple(panel["gridPos"].values()) for panel in content["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in content["panels"]}) == len(places)
