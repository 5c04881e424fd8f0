"""What every route refuses, and that nothing changed then."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lazytrain.platform.api import guard

Service = Any
CHANGES = ("post", "put", "patch", "delete")


def routes(service: Service) -> Iterator[tuple[str, str]]:
    """Every method and address of the OpenAPI description."""
    described = service.client("root").get("/api/openapi.json").json()
    for path, methods in described["paths"].items():
        for method in methods:
            yield method, path.replace("{job_id}", "j-0123456789").replace("{name}", "a").replace("{number}", "1")


def contents(service: Service) -> tuple[Any, ...]:
    return (service.store.jobs.list(), service.store.jobs.requests(), service.store.people.list())


def test_there_are_the_promised_routes(service: Service) -> None:
    paths = service.client("root").get("/api/openapi.json").json()["paths"]
    promised = {"/jobs", "/jobs/{job_id}", "/nodes", "/queue", "/plan", "/health"}
    promised |= {f"/jobs/{{job_id}}/{name}" for name in ("logs", "metrics", "policy", "timeline", "events")}
    assert {f"/api/v1{name}" for name in promised} <= paths.keys()


@pytest.mark.parametrize("token", [None, "Bearer nonsense", "Basic YWRhOng=", "Bearer", ""])
def test_no_route_answers_without_a_token(service: Service, token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_BAD_TOKENS_PER_MINUTE", 10**6)
    client = service.client(None, **({"Authorization": token} if token is not None else {}))
    found = [(method, path) for method, path in routes(service)]
    assert len(found) > 15
    for method, path in [*found, ("get", "/api/openapi.json"), ("get", "/nothing")]:
        answer = client.request(method, path, **({"json": {}} if method in CHANGES else {}))
        assert answer.status_code == 401, (method, path)
        assert answer.json()["error"]["code"] == "unauthorized"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.test"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": "http://127.0.0.1:9999"}, 403),
        ({"Host": "evil.test"}, 403),
        ({"Host": "evil.test:8470"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
    ],
)
def test_a_foreign_page_cannot_change_anything(service: Service, headers: dict[str, str], status: int) -> None:
    service.submit()
    before = contents(service)
    client = service.client("root")
    body = json.dumps({"spec": service.spec(), "all": True, "role": "admin", "priority": 1, "drained": True})
    for method, path in routes(service):
        if method in CHANGES:
            sent = {"Content-Type": "application/json", **headers}
            assert client.request(method, path, content=body, headers=sent).status_code == status, (method, path)
    assert contents(service) == before


def test_our_own_page_may(service: Service) -> None:
    answer = service.submit(headers={"Origin": "http://127.0.0.1:8470"})
    assert answer.status_code == 201


def test_a_body_that_is_too_large(service: Service) -> None:
    answer = service.submit(headers={}, comment="x" * (1 << 21))
    assert answer.status_code == 413
    assert service.store.jobs.list() == []


def test_too_many_requests_of_one_user(new_service: Any) -> None:
    service = new_service(requests_per_minute=30)
    codes = [service.client("ada").get("/api/v1/jobs").status_code for _ in range(12)]
    assert codes == [200] * 10 + [429] * 2
    assert service.client("ben").get("/api/v1/jobs").status_code == 200


def test_guessing_tokens_is_slow(service: Service) -> None:
    client = service.client(None, Authorization="Bearer x")
    codes = {client.get("/api/v1/jobs").status_code for _ in range(15)}
    assert codes == {401, 429}
    assert service.client("ada").get("/api/v1/jobs").status_code == 200


def test_changes_are_written_down_without_bodies_and_tokens(service: Service) -> None:
    job = service.submit().json()["id"]
    service.client("ben").post(f"/api/v1/jobs/{job}/stop", json={})
    service.client("ada").get("/api/v1/jobs")
    assert [(e.user, e.method, e.path, e.status) for e in service.store.audit.list()] == [
        ("ben", "POST", f"/api/v1/jobs/{job}/stop", 404),
        ("ada", "POST", "/api/v1/jobs", 201),
    ]


def test_answers_are_not_kept_and_run_nothing(service: Service) -> None:
    headers = service.client().get("/api/v1/jobs").headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "default-src 'none'" in headers["content-security-policy"]


def test_roles(service: Service) -> None:
    job = service.submit("ada").json()["id"]
    expected = {
        ("vic", "get", f"/jobs/{job}"): 200,
        ("vic", "post", "/jobs"): 403,
        ("vic", "post", f"/jobs/{job}/stop"): 403,
        ("vic", "post", "/jobs/stop"): 403,
        ("ada", "get", "/users"): 403,
        ("ada", "put", "/users/eve"): 403,
        ("ada", "post", "/users/ada/token"): 403,
        ("ada", "post", "/nodes/a/drain"): 403,
        ("ben", "get", f"/jobs/{job}"): 404,
        ("ben", "get", f"/jobs/{job}/logs"): 404,
        ("ben", "delete", f"/jobs/{job}"): 404,
        ("root", "post", f"/jobs/{job}/stop"): 202,
        ("root", "put", "/users/eve"): 200,
    }
    bodies: dict[str, Any] = {"/users/eve": {"role": "viewer"}, "/nodes/a/drain": {"drained": True}, "/jobs/stop": {}}
    bodies["/jobs"] = {"spec": service.spec()}
    for (user, method, path), status in expected.items():
        body = {"json": bodies.get(path, {})} if method in ("post", "put") else {}
        answer = service.client(user).request(method, f"/api/v1{path}", **body)
        assert answer.status_code == status, (user, method, path, answer.text)


def test_a_new_token_replaces_the_one_before(service: Service) -> None:
    new = service.client("root").post("/api/v1/users/ada/token", json={}).json()["token"]
    assert service.client("ada").get("/api/v1/jobs").status_code == 401
    service.tokens["ada"] = new
    assert service.client("ada").get("/api/v1/jobs").status_code == 200


def test_twenty_threads_with_one_key_make_one_job(service: Service) -> None:
    """Case U83."""
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda _: service.submit(headers={"Idempotency-Key": "k"}), range(20)))
    assert sorted({answer.status_code for answer in answers}) == [200, 201]
    assert [answer.status_code for answer in answers].count(201) == 1
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len({answer.json()["run_dir"] for answer in answers}) == 1
    assert len(service.store.jobs.list()) == 1
    other = service.submit(headers={"Idempotency-Key": "k"}, train={"seed": 1})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")


def test_a_stranger_cannot_fill_the_disk_with_refusals(service: Service) -> None:
    strangers = [
        {"Authorization": "Bearer x"},
        {"Host": "evil.test"},
        {"Origin": "http://evil.test"},
        {"Content-Type": "text/plain"},
    ]
    for headers in strangers * 15:
        client = service.client(None, **headers)
        assert client.post("/api/v1/jobs", content="{}").status_code in (401, 403, 415, 429)
    assert 0 < len(service.store.audit.list(limit=1000)) <= 12


def test_what_somebody_asked_for_is_not_everybodys_to_see(service: Service) -> None:
    job = service.submit("ada").json()["id"]
    (mine,) = service.client("ada").post(f"/api/v1/jobs/{job}/pause", json={}).json()["requests"]
    (of_admin,) = service.client("root").post(f"/api/v1/jobs/{job}/stop", json={}).json()["requests"]
    seen = {
        (user, number): service.client(user).get(f"/api/v1/requests/{number}").status_code
        for user in ("ada", "ben", "root")
        for number in (mine, of_admin)
    }
    assert seen == {
        ("ada", mine): 200, ("ada", of_admin): 200,
        ("ben", mine): 404, ("ben", of_admin): 404,
        ("root", mine): 200, ("root", of_admin): 200,
    }  # fmt: skip


def test_the_only_admin_stays_one(service: Service) -> None:
    answer = service.client("root").put("/api/v1/users/root", json={"role": "viewer"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    assert service.client("root").put("/api/v1/users/eve", json={"role": "admin"}).status_code == 200
    assert service.client("root").put("/api/v1/users/root", json={"role": "viewer"}).status_code == 200


def nested(depth: int) -> str:
    return '{"spec": {"x": ' + "[" * depth + "]" * depth + "}}"


ODD_BODIES = [
    "", " ", "null", "[]", "0", '"spec"', "{}", '{"spec": null}', '{"spec": []}', '{"spec": {}}', "[" * 100_000,
    nested(240), nested(5_000), nested(100_000), '{"spec": {"name": NaN}}', '{"spec": {"train": {"batch": 1e999}}}',
    '{"spec": {"train": {"seed": ' + "9" * 5000 + "}}}",
    '{"spec": {"name": "\\ud800"}}', '{"spec": {"name": "\\u0000"}}',
    '{"spec": {}, "after": ["' + "j" * 100_000 + '"]}', '{"spec": {}, "spec": {}}', "\xff\xfe", "{" * 3,
    '{"spec": {"name": "a"}, "after": [' + ",".join(['"j-0123456789"'] * 101) + "]}",
]  # fmt: skip


def test_odd_bodies_are_refused_in_words(new_service: Any) -> None:
    service = new_service(requests_per_minute=10**6)
    client, sent = service.client("root"), {"Content-Type": "application/json"}
    changing = [(method, path) for method, path in routes(service) if method in CHANGES]
    for method, path in changing:
        for body in ODD_BODIES:
            answer = client.request(method, path, content=body.encode("latin-1"), headers=sent)
            where = (method, path, body[:40])
            assert answer.status_code < 500, where
            assert answer.status_code < 300 or answer.json()["error"]["message"], where
    assert service.store.jobs.list() == []
