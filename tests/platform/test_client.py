"""The typed client against the API over a real socket."""

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import (
    Conflict,
    Forbidden,
    LazytrainError,
    NotFound,
    SpecError,
    TooMany,
    Unauthorized,
    Unreachable,
)
from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.artifacts import JobFiles
from lazytrain.platform.client import Client
from lazytrain.platform.store import Lease, Move

Service = Any


@pytest.fixture
def client(service: Service, served: str) -> Client:
    return Client(served, service.tokens["ada"])


@pytest.fixture
def lease(service: Service) -> Lease:
    taken = service.store.leases.take("controller", "me", 0.0, 1e12)
    assert taken is not None
    return taken


def test_a_job_from_a_mapping_and_from_a_file(service: Service, client: Client) -> None:
    first = client.submit(service.spec())
    file = service.folder / "job.yaml"
    file.write_text("model: {path: org/model}\ndata: {train: [{path: rows.jsonl}]}\n")
    second = client.submit(file, after=[first.id])
    shown = client.job(second.id)
    assert shown.spec is not None
    assert shown.spec["data"]["train"][0]["path"] == str(service.folder / "rows.jsonl")
    assert shown.after == [first.id]
    assert [job.id for job in client.jobs()] == [second.id, first.id]
    assert [job.id for job in client.jobs(limit=1)] == [second.id]
    assert client.jobs(states=["RUNNING"]) == []


def test_a_key_makes_one_job(service: Service, client: Client) -> None:
    ids = {client.submit(service.spec(), key="k").id for _ in range(3)}
    assert len(ids) == 1
    with pytest.raises(Conflict, match="was used for another job"):
        client.submit(service.spec(name="other"), key="k")


def test_errors_are_what_they_were_in_the_service(service: Service, client: Client, served: str) -> None:
    with pytest.raises(NotFound) as missing:
        client.job("j-0123456789")
    assert "lazytrain ps" in missing.value.hint
    with pytest.raises(SpecError) as wrong:
        client.submit(service.spec(train={"bach": 1}))
    assert (wrong.value.field, wrong.value.exit_code) == ("train.bach", 2)
    with pytest.raises(Unauthorized):
        Client(served, "nonsense").jobs()
    with pytest.raises(Forbidden):
        Client(served, service.tokens["vic"]).submit(service.spec())


def test_nobody_answers() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(Unreachable, match="no service answers") as caught:
        Client(url, "token").health()
    assert "lazytrain up" in caught.value.hint


def test_a_broken_connection_makes_no_second_job(service: Service, served: str) -> None:
    """The first answer is lost on its way; the client asks again with the same key."""
    port = int(served.rsplit(":", 1)[1])
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        thread = threading.Thread(target=lose_the_first_answer, args=(proxy, port), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        job = Client(url, service.tokens["ada"]).submit(service.spec())
        thread.join(20)
    assert [known.id for known in service.store.jobs.list()] == [job.id]


def whole_message(connection: socket.socket) -> bytes:
    """Head and body, which come in as many pieces as they like."""
    with connection.makefile("rb") as stream:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += stream.readline()
        (length,) = [
            int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length")
        ]
        return head + stream.read(length)


def lose_the_first_answer(proxy: socket.socket, port: int) -> None:
    for lose in (True, False):
        connection, _ = proxy.accept()
        with connection, socket.create_connection(("127.0.0.1", port)) as behind:
            behind.sendall(whole_message(connection))
            answer = whole_message(behind)
            if not lose:
                connection.sendall(answer)


def test_a_client_that_leaves_in_the_middle_leaves_nothing_half_made(service: Service, served: str) -> None:
    """Case U86, without waiting: half a body makes no job."""
    port = int(served.rsplit(":", 1)[1])
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            head = (
                f"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
                f"Authorization: Bearer {service.tokens['ada']}\r\nContent-Length: 1000\r\n\r\n"
            )
            connection.sendall(head.encode() + b'{"spec": {')
    assert Client(served, service.tokens["ada"]).jobs() == []


def test_changes_wait_for_the_controllers_answer(service: Service, client: Client) -> None:
    job = client.submit(service.spec())
    answers = {"pause": "only a running job can be paused", "resume": "", "set": "", "remove": ""}

    def controller() -> None:
        done = 0
        while done < 3:
            for request in service.store.jobs.requests():
                service.store.jobs.answer(request.id, 1.0, answers[request.action.value])
                done += 1

    thread = threading.Thread(target=controller, daemon=True)
    thread.start()
    assert client.pause(job.id) == "only a running job can be paused"
    assert client.resume(job.id) == ""
    assert client.set_priority(job.id, 9) == ""
    thread.join(20)
    client.stop(job.id)
    assert [request.action.value for request in service.store.jobs.requests()] == ["stop"]


def test_a_log_is_followed_to_the_end_of_the_job(service: Service, client: Client, lease: Lease) -> None:
    job_id = client.submit(service.spec()).id
    store = service.store.jobs
    started = store.move(store.get(job_id), Move(JobState.STARTING, "s", "s"), 1.0, lease, attempt=1, claim="c")
    files = JobFiles(started.run_dir)
    files.claim(job_id)
    log = files.attempt(1).log
    log.parent.mkdir(parents=True)
    log.write_text("one\n")
    texts = client.follow_log(job_id, every_s=0.01)
    assert next(texts) == "one\n"
    with log.open("a") as file:
        file.write("two\n")
    assert next(texts) == "two\n"
    running = store.move(started, Move(JobState.RUNNING, "r", "r"), 2.0, lease)
    store.move(running, Move(JobState.FAILED, "f", "f"), 3.0, lease)
    assert "".join(texts) == ""
    assert client.wait(job_id).state == "FAILED"


def test_metrics_in_pieces(service: Service, client: Client, tmp_path: Path) -> None:
    job = client.submit(service.spec())
    files = JobFiles(job.run_dir)
    files.claim(job.id)
    files.metrics.write_text("".join(f'{{"step": {step}, "text": "{"x" * 1000}"}}\n' for step in range(2500)))
    assert [row["step"] for row in client.metrics(job.id)] == list(range(2500))


def answers(server: socket.socket, said: list[str]) -> None:
    """One connection after the other, each with the next of these answers; an empty one hangs up."""
    for text in said:
        connection, _ = server.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(text.encode())


def http(status: int, body: str) -> str:
    return f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"


def refusal(status: int, code: str) -> str:
    return http(status, json.dumps({"error": {"code": code, "message": "later, please"}}))


def test_a_patient_client_waits_for_a_service_that_is_away_or_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazytrain.platform.client._PAUSE_S", 0.0)
    busy, down = refusal(429, "too_many"), refusal(503, "unreachable")
    me = http(200, json.dumps({"name": "ada", "role": "viewer"}))
    with socket.create_server(("127.0.0.1", 0)) as server:
        said = [busy, *["", "", "", ""], busy, down, me]
        threading.Thread(target=answers, args=(server, said), daemon=True).start()
        client = Client(f"http://127.0.0.1:{server.getsockname()[1]}", "token")
        with pytest.raises(TooMany):
            client.me()
        assert client.patient().me().name == "ada"


def test_another_program_at_its_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answers, args=(server, [http(200, "<html>hi</html>")]), daemon=True).start()
        with pytest.raises(LazytrainError, match="is not this service") as caught:
            Client(f"http://127.0.0.1:{server.getsockname()[1]}", "token").me()
        assert "<html>hi" in caught.value.hint
