"""Submitting, listing, looking at and changing jobs over REST."""

import json
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import DataError
from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.admission import Admission, Way
from lazytrain.platform.api import submission
from lazytrain.platform.artifacts import JobFiles, write_json
from lazytrain.platform.store import Lease, Move, Node

Service = Any


@pytest.fixture
def lease(service: Service) -> Lease:
    taken = service.store.leases.take("controller", "me", 0.0, 1e12)
    assert taken is not None
    return taken


def job_of(service: Service, **changes: Any) -> str:
    answer = service.submit(**changes)
    assert answer.status_code == 201, answer.text
    found: str = answer.json()["id"]
    return found


def run_files(service: Service, job: str) -> JobFiles:
    files = JobFiles(service.store.jobs.get(job).run_dir)
    files.claim(job)
    return files


def start(service: Service, job: str, lease: Lease) -> None:
    stored = service.store.jobs.get(job)
    service.store.jobs.move(stored, Move(JobState.STARTING, "s", "s"), 1.0, lease, attempt=1, claim="c", node="a")


def end(service: Service, job: str, lease: Lease) -> None:
    service.store.jobs.move(service.store.jobs.get(job), Move(JobState.STOPPED, "stopped", "x"), 1.0, lease)


def test_a_job_is_queued_with_every_default_in_a_folder_of_its_own(service: Service) -> None:
    first, second = job_of(service), job_of(service)
    shown = service.client().get(f"/api/v1/jobs/{first}").json()
    assert (shown["state"], shown["user"], shown["name"], shown["priority"]) == ("QUEUED", "ada", "tiny", 50)
    assert shown["spec"]["train"]["epochs"] == 1
    assert shown["run_dir"] == str(service.folder / "out" / first)
    assert service.client().get(f"/api/v1/jobs/{second}").json()["run_dir"] != shown["run_dir"]


def test_without_a_folder_it_gets_one_of_the_services(service: Service) -> None:
    assert service.submit(output={"save_every": 5}).json()["run_dir"].startswith(str(service.settings.runs_dir))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train": {"bach": 3}}, "train.bach"),
        ({"train": {"batch": 0}}, "train.batch"),
        ({"train": {"learning_rate": "fast"}}, "train.learning_rate"),
        ({"name": "<img src=x onerror=alert(1)>"}, "name"),
        ({"model": {"path": "../../etc/passwd"}}, "model.path"),
        ({"model": {"path": "/etc"}}, "model.path"),
        ({"data": {"train": [{"path": "rows.jsonl"}]}}, "data.train.0.path"),
        ({"data": {"train": [{"path": "/etc/passwd"}]}}, "data.train.0.path"),
        ({"data": {"train": [{"path": "LAB/../../../etc/passwd"}]}}, "data.train.0.path"),
        ({"data": {"train": [{"path": "LAB/" + "x" * 5000}]}}, "data.train.0.path"),
        ({"data": {"train": [{"path": "LAB/a\x00b"}]}}, "spec"),
        ({"data": {"train": [{"path": "LAB/a\ud800b"}]}}, "spec"),
        ({"output": {"dir": "/tmp"}}, "output.dir"),
        ({"plan": {"nvme": "/dev"}}, "plan.nvme"),
        ({"train": {"seed": 1 << 64}}, "train.seed"),
        ({"data": {"train": [{"path": "LAB/r"}], "chat_template": "/etc/passwd"}}, "data.chat_template"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(service: Service, changes: dict[str, Any], field: str) -> None:
    text = json.dumps({"spec": service.spec(**changes)}).replace("LAB", str(service.folder))
    answer = service.client().post("/api/v1/jobs", content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["field"].endswith(field)
    assert "root:" not in answer.text
    assert service.store.jobs.list() == []


@pytest.mark.parametrize("place", ["part.jsonl", "below/it/part.jsonl"])
def test_links_that_lead_out_of_the_roots(service: Service, place: str) -> None:
    link = service.folder / "rows" / place
    link.parent.mkdir(parents=True)
    link.symlink_to("/etc/passwd")
    answer = service.submit(data={"train": [{"path": str(service.folder / "rows")}]})
    assert answer.status_code == 422
    assert "part.jsonl" in answer.json()["error"]["message"]


def test_a_folder_that_nobody_can_look_through(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_MOST_FILES", 3)
    rows = service.folder / "rows"
    rows.mkdir()
    for number in range(4):
        (rows / f"{number}.jsonl").touch()
    answer = service.submit(data={"train": [{"path": str(rows)}]})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "data.train.0.path")
    assert service.submit(output={"dir": str(rows)}).status_code == 201


def test_a_models_own_code_runs_only_where_it_is_trusted(service: Service) -> None:
    model = {"path": "org/model", "trust_remote_code": True}
    refused = service.submit(model=model)
    assert refused.status_code == 403
    assert "trust_remote_code" in refused.json()["error"]["message"]
    service.app.state.settings = service.settings.model_copy(update={"trusted_models": ("org/model",)})
    assert service.submit(model=model).status_code == 201


@pytest.mark.parametrize(
    "bad", ["../../etc/passwd", "%2e%2e", "j-1", "j-" + "0" * 5000, "j-0123456789%00", "J-0123456789"]
)
def test_ids_that_are_none(service: Service, bad: str) -> None:
    for path in (f"/api/v1/jobs/{bad}", f"/api/v1/jobs/{bad}/logs"):
        answer = service.client().get(path)
        assert answer.status_code in (404, 422)
        assert answer.json()["error"]["message"]


def test_lists_come_in_pages(service: Service) -> None:
    made = [job_of(service) for _ in range(5)]
    job_of(service, user="ben")
    seen: list[str] = []
    before = None
    while True:
        query = {"limit": 2, **({"before": before} if before else {})}
        page = service.client().get("/api/v1/jobs", params=query).json()
        seen += [job["id"] for job in page["jobs"]]
        before = page["next"]
        if before is None:
            break
    assert seen == made[::-1]
    assert len(service.client("vic").get("/api/v1/jobs").json()["jobs"]) == 6
    assert len(service.client("vic").get("/api/v1/jobs", params={"owner": "ben"}).json()["jobs"]) == 1
    assert service.client().get("/api/v1/jobs", params={"state": "RUNNING"}).json()["jobs"] == []


def test_changes_are_requests_and_the_state_stays(service: Service) -> None:
    job = job_of(service)
    client = service.client()
    asked = [
        client.post(f"/api/v1/jobs/{job}/{action}", json={}).json()["requests"][0]
        for action in ("stop", "pause", "resume")
    ]
    asked += client.patch(f"/api/v1/jobs/{job}", json={"priority": 7}).json()["requests"]
    waiting = service.store.jobs.requests()
    assert [request.id for request in waiting] == asked
    assert [request.action.value for request in waiting] == ["stop", "pause", "resume", "set"]
    assert client.get(f"/api/v1/jobs/{job}").json()["state"] == "QUEUED"
    assert client.get(f"/api/v1/requests/{asked[0]}").json() == {"done": False, "answer": ""}
    service.store.jobs.answer(asked[1], 1.0, "only a running job can be paused")
    assert client.get(f"/api/v1/requests/{asked[1]}").json()["answer"] == "only a running job can be paused"


def test_stop_works_in_every_state_with_the_id_of_the_list(service: Service, lease: Lease) -> None:
    job = job_of(service)
    listed = service.client().get("/api/v1/jobs").json()["jobs"][0]["id"]
    assert service.client().post(f"/api/v1/jobs/{listed}/stop", json={}).status_code == 202
    start(service, job, lease)
    assert service.client().post(f"/api/v1/jobs/{listed}/stop", json={}).status_code == 202


def test_many_are_stopped_at_once_but_never_other_peoples(service: Service) -> None:
    mine = [job_of(service) for _ in range(3)]
    other = job_of(service, user="ben")
    refused = service.client().post("/api/v1/jobs/stop", json={"ids": [mine[0], other]})
    assert refused.status_code == 404
    assert service.store.jobs.requests() == []
    assert len(service.client().post("/api/v1/jobs/stop", json={"all": True}).json()["requests"]) == 3
    assert {request.job for request in service.store.jobs.requests()} == set(mine)


def test_removing_and_retrying_need_an_end(service: Service, lease: Lease) -> None:
    job = job_of(service)
    client = service.client()
    assert client.delete(f"/api/v1/jobs/{job}").status_code == 409
    assert client.post(f"/api/v1/jobs/{job}/retry", json={}).status_code == 409
    end(service, job, lease)
    again = client.post(f"/api/v1/jobs/{job}/retry", json={})
    assert again.status_code == 201
    assert again.json()["id"] != job
    assert again.json()["state"] == "QUEUED"
    assert again.json()["run_dir"] == str(service.folder / "out" / job / again.json()["id"]).replace(f"{job}/", "")
    anew = client.post(f"/api/v1/jobs/{job}/retry", params={"fresh": True}, json={})
    made = [service.store.jobs.get(answer.json()["id"]).continues for answer in (again, anew)]
    assert made == [job, None]
    assert client.delete(f"/api/v1/jobs/{job}", params={"files": True}).status_code == 202


def test_a_job_after_another(service: Service) -> None:
    first = job_of(service)
    body = {"spec": service.spec(), "after": [first]}
    assert service.client().post("/api/v1/jobs", json=body).json()["after"] == [first]
    assert service.client("ben").post("/api/v1/jobs", json=body).status_code == 404


def test_events_since_the_last_one_seen(service: Service, lease: Lease) -> None:
    job = job_of(service)
    start(service, job, lease)
    events = service.client().get(f"/api/v1/jobs/{job}/events").json()["events"]
    assert [event["state"] for event in events] == ["QUEUED", "STARTING"]
    later = service.client().get(f"/api/v1/jobs/{job}/events", params={"since": events[0]["id"]}).json()["events"]
    assert later == events[1:]


# ---- files


def test_logs_metrics_and_records(service: Service, lease: Lease) -> None:
    job = job_of(service)
    client = service.client()
    assert client.get(f"/api/v1/jobs/{job}/logs").json() == {"text": "", "offset": 0, "attempt": 0}
    assert client.get(f"/api/v1/jobs/{job}/policy").status_code == 404
    start(service, job, lease)
    files = run_files(service, job)
    write_json(files.attempt(1).beat, {"beat": 3, "step": 5, "total_steps": 10, "step_s": 0.5})
    files.attempt(1).log.write_bytes(b"one\ntwo\n\xff three\n")
    files.metrics.write_text('{"step": 1, "loss": NaN, "lr": 0.1}\n{"step": 2, "loss": 0.5}\n')
    write_json(files.policy, {"micro_batch": 4})
    text = client.get(f"/api/v1/jobs/{job}/logs").json()
    assert text["text"] == "one\ntwo\n\ufffd three\n"
    assert client.get(f"/api/v1/jobs/{job}/logs", params={"tail": 1}).json()["text"] == "\ufffd three"
    assert client.get(f"/api/v1/jobs/{job}/logs", params={"offset": 4, "limit": 4}).json()["text"] == "two\n"
    answer = client.get(f"/api/v1/jobs/{job}/metrics")
    rows = json.loads(answer.text, parse_constant=lambda name: pytest.fail(name))["rows"]
    assert rows == [{"step": 1, "loss": None, "lr": 0.1}, {"step": 2, "loss": 0.5}]
    assert client.get(f"/api/v1/jobs/{job}/metrics", params={"offset": answer.json()["offset"]}).json()["rows"] == []
    assert client.get(f"/api/v1/jobs/{job}/policy").json() == {"micro_batch": 4}
    progress = client.get(f"/api/v1/jobs/{job}").json()["progress"]
    assert (progress["step"], progress["total_steps"], progress["step_s"]) == (5, 10, 0.5)


def test_links_in_a_jobs_folder_lead_nowhere(service: Service, lease: Lease, tmp_path: Path) -> None:
    job = job_of(service)
    start(service, job, lease)
    files = run_files(service, job)
    secret = tmp_path / "secret.json"
    secret.write_text('{"password": "x"}\n')
    files.attempt(1).path.mkdir(parents=True)
    for path in (files.policy, files.metrics, files.attempt(1).log):
        path.symlink_to(secret)
    for name in ("policy", "metrics", "logs"):
        assert "password" not in service.client().get(f"/api/v1/jobs/{job}/{name}").text


def test_a_folder_that_is_not_the_jobs_is_not_read(service: Service) -> None:
    job = job_of(service)
    files = JobFiles(service.store.jobs.get(job).run_dir)
    write_json(files.policy, {"password": "x"})
    assert service.client().get(f"/api/v1/jobs/{job}/policy").status_code == 404


def test_all_checkpoints_are_listed_and_damaged_ones_marked(service: Service) -> None:
    """Case U113."""
    job = job_of(service)
    files = run_files(service, job)
    for step in range(120):
        folder = files.checkpoints / f"step-{step:08d}-{step:06d}"
        folder.mkdir(parents=True)
        if step not in (7, 8):
            write_json(folder / "manifest.json", {"step": step}, durable=False)
    client = service.client()
    first = client.get(f"/api/v1/jobs/{job}/checkpoints").json()
    second = client.get(f"/api/v1/jobs/{job}/checkpoints", params={"since": first["next"]}).json()
    listed = first["checkpoints"] + second["checkpoints"]
    assert [checkpoint["step"] for checkpoint in listed] == list(range(120))
    assert [c["step"] for c in listed if not c["complete"]] == [7, 8]
    assert second["next"] is None


# ---- the service


def test_the_queue_shows_other_peoples_jobs_without_what_they_are(service: Service) -> None:
    mine = job_of(service)
    job_of(service, user="ben", queue={"priority": 90})
    waiting = service.client().get("/api/v1/queue").json()["waiting"]
    assert [(entry["id"], entry["user"], entry["priority"]) for entry in waiting] == [
        (None, None, 90),
        (mine, "ada", 50),
    ]


def test_nodes_and_draining(service: Service) -> None:
    node = Node(name="a", address="10.0.0.1", kind="H800", device="cuda", cpus=8, gpus=1, alive=True)
    service.store.nodes.see([node], 1.0)
    (shown,) = service.client().get("/api/v1/nodes").json()["nodes"]
    assert (shown["name"], shown["alive"], shown["measured"]) == ("a", True, False)
    drained = service.client("root").post("/api/v1/nodes/a/drain", json={"drained": True, "reason": "new disk"})
    assert (drained.json()["drained"], drained.json()["reason"]) == (True, "new disk")
    assert service.client("root").post("/api/v1/nodes/b/drain", json={"drained": True}).status_code == 404


def test_planning_without_running(service: Service) -> None:
    ask = {"spec": service.spec()}
    assert service.client().post("/api/v1/plan", json=ask).status_code == 404
    node = Node(name="a", address="x", kind="H800", device="cuda", cpus=8, gpus=1, alive=True)
    service.store.nodes.see([node], 1.0)
    service.store.nodes.set_profile("a", {"kind": "H800"})
    option = {"tokens_per_s": 10.0, "work_tokens": 100.0, "startup_s": 5.0, "host_bytes": 7, "nvme_bytes": 0}
    service.planner.answer = Admission(
        batch=8,
        steps=3,
        ways={"H800": Way(option=option, policy={"micro_batch": 8}, device={})},
        limits={"A10": "small"},
        notes=("long rows",),
    )
    found = service.client().post("/api/v1/plan", json=ask).json()
    assert (found["feasible"], found["batch"], found["ways"]["H800"]["seconds"]) == (True, 8, 15.0)
    assert (found["limits"], found["notes"]) == ({"A10": "small"}, ["long rows"])
    service.planner.answer = DataError("no usable row", hint="look")
    bad = service.client().post("/api/v1/plan", json=ask)
    assert (bad.status_code, bad.json()["error"]["code"]) == (422, "invalid_data")
    assert service.store.jobs.list() == []


def test_health_says_whether_somebody_leads(service: Service, lease: Lease) -> None:
    health = service.client().get("/api/v1/health").json()
    assert (health["status"], health["leader"], health["database"]) == ("ok", "me", "sqlite")
    service.store.leases.give_back(lease)
    assert service.client().get("/api/v1/health").json()["status"] == "degraded"


def test_unknown_addresses_and_methods_are_errors_like_any_other(service: Service) -> None:
    for method, path, status in (("GET", "/api/v1/none", 404), ("PUT", "/api/v1/jobs", 405)):
        answer = service.client().request(method, path, **({"json": {}} if method == "PUT" else {}))
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"code", "message", "hint", "field"}


@pytest.mark.parametrize("beat", ["{}", '{"step": "x"}', '{"step_s": 1e999}', "[" * 100_000])
def test_what_a_user_writes_into_a_folder_breaks_nobodys_list(service: Service, lease: Lease, beat: str) -> None:
    job = job_of(service)
    files = run_files(service, job)
    start(service, job, lease)
    files.attempt(1).path.mkdir(parents=True)
    files.attempt(1).beat.write_text(beat)
    files.metrics.write_text('{"tokens_per_s": %s, "loss": 1e999, "gpu_bytes": true}\n' % ("9" * 400))
    for address in ("jobs", f"jobs/{job}", "queue"):
        assert service.client("root").get(f"/api/v1/{address}").status_code == 200, address
