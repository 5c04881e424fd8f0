"""The queue's commands, against the API over a real socket."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.lifecycle import JobState
from lazytrain.jobs.policy import Boundary, LayerPolicy, Policy
from lazytrain.jobs.timeline import Span, Timeline
from lazytrain.platform.artifacts import JobFiles, write_json
from lazytrain.platform.cli.app import run
from lazytrain.platform.store import Lease, Move, Node
from lazytrain.schedulers.copies import CopyRates

Service = Any


@pytest.fixture(autouse=True)
def home(service: Service, served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LAZYTRAIN_API_PORT", served.rsplit(":", 1)[1])
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(service.tokens["ada"])


@pytest.fixture
def lease(service: Service) -> Lease:
    taken = service.store.leases.take("controller", "me", 0.0, 1e12)
    assert taken is not None
    return taken


@pytest.fixture
def controller(service: Service) -> Iterator[None]:
    """Answers every request at once with yes."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.02):
            for request in service.store.jobs.requests():
                service.store.jobs.answer(request.id, 1.0)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join(10)


@pytest.fixture
def job_file(service: Service) -> Path:
    file: Path = service.folder / "job.yaml"
    file.write_text("model: {path: org/model}\ndata: {train: [{path: rows.jsonl}]}\n")
    return file


def asked(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert run([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def drawn(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run(arguments) == code
    return " ".join(capsys.readouterr().out.split())


def move(service: Service, job: str, lease: Lease, to: JobState, sentence: str, **changes: Any) -> None:
    service.store.jobs.move(service.store.jobs.get(job), Move(to, "r", sentence), 1.0, lease, **changes)


def test_submit_list_and_show_why_it_waits(
    service: Service, job_file: Path, lease: Lease, capsys: pytest.CaptureFixture[str]
) -> None:
    job = asked(capsys, "submit", str(job_file), "-d", "--set", "queue.priority=70")
    assert (job["state"], job["priority"]) == ("QUEUED", 70)
    service.store.jobs.annotate(
        service.store.jobs.get(job["id"]), 2.0, lease, reason="gpu_busy", sentence="both H800 are busy until 14:30"
    )
    assert [listed["id"] for listed in asked(capsys, "ps")["jobs"]] == [job["id"]]
    assert "both H800 are busy until 14:30" in drawn(capsys, "show", job["id"])
    assert asked(capsys, "show", job["id"])["events"][-1]["reason"] == "gpu_busy"


@pytest.mark.parametrize(
    ("state", "reason", "code"),
    [(JobState.REJECTED, "does_not_fit", 3), (JobState.REJECTED, "invalid_data", 2), (JobState.STOPPED, "stopped", 1)],
)
def test_submit_follows_to_the_end_and_leaves_with_its_code(
    service: Service,
    job_file: Path,
    lease: Lease,
    capsys: pytest.CaptureFixture[str],
    state: JobState,
    reason: str,
    code: int,
) -> None:
    def controller() -> None:
        while not (jobs := service.store.jobs.list()):
            pass
        service.store.jobs.move(jobs[0], Move(state, reason, "so it is"), 1.0, lease)

    thread = threading.Thread(target=controller, daemon=True)
    thread.start()
    ended = asked(capsys, "submit", str(job_file), code=code)
    thread.join(10)
    assert (ended["state"], ended["sentence"]) == (state.value, "so it is")


def test_changes(
    service: Service, job_file: Path, lease: Lease, controller: None, capsys: pytest.CaptureFixture[str]
) -> None:
    job = asked(capsys, "submit", str(job_file), "-d")["id"]
    assert asked(capsys, "set", job, "priority=90")["done"] == "priority is 90"
    assert asked(capsys, "pause", job)["id"] == job
    assert asked(capsys, "resume", job)["id"] == job
    assert asked(capsys, "stop", job)["asked"] == [job]
    assert asked(capsys, "stop", "--all")["asked"] == "all"
    assert asked(capsys, "rm", job, code=1)["error"]["code"] == "conflict"
    move(service, job, lease, JobState.STOPPED, "stopped")
    again = asked(capsys, "retry", job)
    assert again["id"] != job
    assert asked(capsys, "rm", job)["done"] == "removed"


@pytest.mark.parametrize("arguments", [["stop"], ["set", "j-0123456789", "priority=many"], ["nodes", "drain"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(capsys, *arguments, code=2)["error"]["hint"]


def test_an_unknown_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(capsys, "show", "j-0123456789", code=2)["error"]["code"] == "not_found"


def test_no_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LAZYTRAIN_HOME", str(tmp_path / "elsewhere"))
    assert "lazytrain up" in asked(capsys, "ps", code=1)["error"]["hint"]


def copy_rates(gpu: str, *, alone: float, shared: float) -> dict[str, Any]:
    rates = {name: alone for name in CopyRates.model_fields if name.endswith("_bytes_s")}
    return {"gpu": gpu, **rates, "all_both_h2d_bytes_s": shared, "all_both_d2h_bytes_s": shared}


def test_nodes_and_top(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    node = Node(name="gpu-7", address="x", kind="H800", device="cuda", cpus=8, gpus=2, alive=True)
    service.store.nodes.see([node], 1.0)
    (shown,) = asked(capsys, "nodes")["nodes"]
    assert shown["name"] == "gpu-7"
    assert "2 x H800" in drawn(capsys, "nodes")
    copies = [copy_rates(gpu, alone=50e9, shared=20e9) for gpu in ("GPU-a", "GPU-b")]
    service.store.nodes.set_profile("gpu-7", {"host_memory_bytes": 1 << 30, "copies": copies})
    told = drawn(capsys, "nodes")
    assert "50, 50 GB/s" in told
    assert "all: 40, 40" in told
    assert asked(capsys, "nodes", "drain", "gpu-7", code=1)["error"]["code"] == "forbidden"
    top = drawn(capsys, "top", "--once")
    assert "nothing is started or ended" in top
    assert "gpu-7" in top


def test_words_of_a_job_are_text(
    service: Service, job_file: Path, lease: Lease, capsys: pytest.CaptureFixture[str]
) -> None:
    job = asked(capsys, "submit", str(job_file), "-d")["id"]
    move(service, job, lease, JobState.REJECTED, "[red]not a colour[/red]")
    assert "[red]not a colour[/red]" in drawn(capsys, "show", job)


def test_show_draws_how_a_job_goes_and_the_same_as_a_file(
    service: Service, job_file: Path, lease: Lease, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = asked(capsys, "submit", str(job_file), "-d", "--set", "name=tiny")["id"]
    assert asked(capsys, "show", job)["step_time"] == {"measured_s": None, "predicted_s": None, "ratio": None}
    move(service, job, lease, JobState.STARTING, "starts", attempt=1, node="gpu-7")
    files = JobFiles(service.store.jobs.get(job).run_dir)
    files.claim(job)
    rows = [
        {"step": k, "loss": 2.0 / k if k != 3 else None, "step_s": 1.1, "predicted_step_s": 1.0} for k in range(1, 9)
    ]
    files.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    boundaries = (Boundary(index=0, home="host"), Boundary(index=1, home="gpu"))
    policy = Policy(
        model_digest="m", micro_batch=1, sequence_length=2, layers=(LayerPolicy(index=0),), boundaries=boundaries
    )
    policy.save(files.policy)
    spans = [Span("load.0", "h2d", 0.0, 0.4, 1 << 20), Span("forward.0", "compute", 0.4, 1.0)]
    write_json(files.timeline, Timeline(spans, 1.0).to_dict())
    assert asked(capsys, "show", job)["step_time"]["ratio"] == pytest.approx(1.1)
    told = drawn(capsys, "show", job, "--html", str(tmp_path / "job.html"))
    assert "10.0% more time than predicted" in told and "█" in told and "×" in told
    assert "boundaries HG" in told and "60%" in told and "400 ms" in told
    assert asked(capsys, "show", job)["calibration"] is None
    seconds = {"measured_s": 1.1, "predicted_s": 1.0, "calibrated_s": 1.08}
    calibration = {"steps": 3, **seconds, "sentence": "a step takes 1.1 s"}
    write_json(files.calibration, calibration)
    assert asked(capsys, "show", job)["calibration"] == calibration
    assert "a step takes 1.1 s" in drawn(capsys, "show", job)
    write_json(files.calibration, {**calibration, "measured_s": -1.0})  # it is its user's to damage
    assert asked(capsys, "show", job)["calibration"] is None
    page = (tmp_path / "job.html").read_text()
    assert f"tiny ({job})" in page and page.count('<svg class="plot plot-') == 4
    assert run(["show", job, "--html", str(tmp_path / "absent" / "job.html")]) == 2


def test_top_shows_use_and_expected_times(service: Service, job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = asked(capsys, "submit", str(job_file), "-d", "--set", "name=soon")["id"]
    node = Node(name="gpu-7", address="x", kind="H800", device="cuda", cpus=8, gpus=2, alive=True)
    service.store.nodes.see([node], 1.0)
    now = time.time()
    service.store.forecasts.put({job: (now + 60, now + 120)}, now)
    told = drawn(capsys, "top", "--once")
    assert "0 of 2 used" in told and "0 tokens/s" in told
    assert "expected start and end" in told
    assert "ends in 119" in told or "ends in 120" in told


def test_what_a_job_printed_also_while_it_goes_on(
    service: Service, job_file: Path, lease: Lease, capsys: pytest.CaptureFixture[str]
) -> None:
    job = asked(capsys, "submit", str(job_file), "-d")["id"]
    move(service, job, lease, JobState.STARTING, "starts", attempt=1, node="gpu-7")
    files = JobFiles(service.store.jobs.get(job).run_dir)
    files.claim(job)
    files.attempt(1).path.mkdir(parents=True)
    files.attempt(1).log.write_text("one\n[red]two[/red]\n")
    assert asked(capsys, "logs", job)["text"] == "one\n[red]two[/red]\n"
    assert drawn(capsys, "logs", job, "--tail", "1") == "[red]two[/red]"
    move(service, job, lease, JobState.FAILED, "is over")
    assert drawn(capsys, "logs", "-f", job) == "one [red]two[/red]"
