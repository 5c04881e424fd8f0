"""What the pages ask of the API beside the rest: who one is, what nodes hold, planning a shape, measuring again."""

import asyncio
import functools
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from lazytrain.jobs.errors import Forbidden, ModelError, SpecError, Unauthorized
from lazytrain.platform.admission import Answer
from lazytrain.platform.api import InProcess
from lazytrain.platform.artifacts import JobFiles, write_json
from lazytrain.platform.client import Client
from lazytrain.platform.schemas import ShapeQuestion
from lazytrain.platform.store import Node
from lazytrain.schedulers.hardware import MEASUREMENT

Service = Any
PLAN = {
    "feasible": True,
    "predicted": {"step_s": 1.0},
    "model": {"layers": 2},
    "machine": {"name": "a"},
    "timeline": None,
}


def within(service: Service, user: str, work: Any) -> Any:
    """What ``work`` does with a client in the API's own process."""
    client = Client("http://127.0.0.1", service.tokens.get(user, user), handlers=[InProcess(service.app)])

    async def main() -> Any:
        return await anyio.to_thread.run_sync(functools.partial(work, client))

    return asyncio.run(main())


def test_who_one_is(service: Service) -> None:
    for user, role in (("ada", "submitter"), ("vic", "viewer"), ("root", "admin")):
        assert service.client(user).get("/api/v1/me").json() == {"name": user, "role": role}


def test_a_client_in_the_same_process_passes_the_same_guard(service: Service) -> None:
    assert within(service, "ada", lambda client: client.me().name) == "ada"
    job = within(service, "ada", lambda client: client.submit(service.spec()))
    assert service.store.jobs.get(job.id).user == "ada"
    with pytest.raises(Unauthorized):
        within(service, "nonsense", lambda client: client.me())
    with pytest.raises(Forbidden):
        within(service, "vic", lambda client: client.submit(service.spec()))
    assert [(entry.user, entry.remote, entry.status) for entry in service.store.audit.list()][:2] == [
        ("vic", "dashboard", 403),
        ("ada", "dashboard", 201),
    ]


def test_an_error_of_the_service_in_the_same_process_is_an_answer(service: Service) -> None:
    service.store.nodes.list = lambda: 1 / 0
    with pytest.raises(Exception, match="the service failed to answer"):
        within(service, "ada", lambda client: client.nodes())


def see(service: Service) -> None:
    node = Node(name="a", address="x", kind="H800", device="cuda", cpus=8, gpus=2, alive=True)
    service.store.nodes.see([node], 1.0)
    service.store.nodes.set_profile("a", {"kind": "H800", "measurement": MEASUREMENT})


def test_a_shape_is_planned_with_the_profile_that_was_measured(service: Service) -> None:
    see(service)
    service.planner.answer = Answer(values=PLAN)
    body = {"model": "qwen2.5-7b", "gpu": "h800", "batch": 8, "length": 64}
    found = service.client().post("/api/v1/plan/shape", json=body).json()
    assert (found["feasible"], found["plan"]["predicted"]["step_s"], found["model"]) == (True, 1.0, {"layers": 2})
    service.planner.answer = ModelError("not asked for the same again")
    assert service.client("ben").post("/api/v1/plan/shape", json=body).status_code == 200
    assert (
        service.client().post("/api/v1/plan/shape", json={**body, "batch": 9}).json()["error"]["code"]
        == "invalid_model"
    )
    assert service.client("vic").post("/api/v1/plan/shape", json=body).status_code == 403


@pytest.mark.parametrize("model", ["/etc", "../x", "a/b/c", "/lab/../etc", "x" * 5000, "hub/name\x00"])
def test_a_model_that_is_no_name_lies_in_an_allowed_folder(service: Service, model: str) -> None:
    body = {"model": model, "gpu": "H800", "batch": 8}
    assert service.client().post("/api/v1/plan/shape", json=body).status_code == 422


def test_the_client_asks_for_a_shape(service: Service) -> None:
    service.planner.answer = Answer(values=PLAN)
    question = ShapeQuestion(model="qwen2.5-7b", gpu="RTX3090", batch=8)
    assert within(service, "ada", lambda client: client.plan_shape(question)).feasible
    with pytest.raises(SpecError):
        within(service, "ada", lambda client: client.plan_shape(question.model_copy(update={"model": "/etc"})))


def test_measuring_a_node_again_is_for_admins(service: Service) -> None:
    see(service)
    assert [node["measured"] for node in service.client().get("/api/v1/nodes").json()["nodes"]] == [True]
    assert service.client().post("/api/v1/nodes/a/profile", json={}).status_code == 403
    assert service.client("root").post("/api/v1/nodes/b/profile", json={}).status_code == 404
    assert service.client("root").post("/api/v1/nodes/a/profile", json={}).json()["measured"] is False
    assert service.store.nodes.get("a").profile == {}


def test_the_run_in_mlflow_is_named_and_linked_where_its_pages_are_known(new_service: Any) -> None:
    service = new_service(mlflow_pages="https://mlflow.example.org/")
    job = service.submit().json()["id"]
    client = service.client()
    assert client.get(f"/api/v1/jobs/{job}").json()["mlflow_url"] is None
    files = JobFiles(service.store.jobs.get(job).run_dir)
    files.claim(job)
    for run, url in (("0a1b", "https://mlflow.example.org/#/runs/0a1b"), ("x' onclick='", None), (5, None)):
        write_json(files.mlflow, {"run_id": run})
        found = client.get(f"/api/v1/jobs/{job}").json()
        assert (found["mlflow_run"], found["mlflow_url"]) == (run if url else None, url)


def test_a_link_to_another_record_is_not_read(service: Service, tmp_path: Path) -> None:
    job = service.submit().json()["id"]
    files = JobFiles(service.store.jobs.get(job).run_dir)
    files.claim(job)
    write_json(tmp_path / "other.json", {"run_id": "secret"})
    files.mlflow.symlink_to(tmp_path / "other.json")
    assert service.client().get(f"/api/v1/jobs/{job}").json()["mlflow_run"] is None
