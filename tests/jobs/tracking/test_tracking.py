"""MLflow gets everything once, whatever dies or is down; training never waits for it."""

import contextlib
import hashlib
import http.server
import importlib
import json
import math
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import InputError, LazytrainError
from lazytrain.jobs.tracking import (
    LocalTracker,
    MetricLog,
    MLflowTracker,
    NullTracker,
    Tracker,
    create_database,
    end_lost_run,
    read_metrics,
    sync_run,
)
from lazytrain.jobs.tracking.forwarder import Forwarder
from lazytrain.jobs.tracking.record import JOB_ID, RunRecord, flat

mlflow = pytest.importorskip("mlflow")
EXPERIMENT = "lab"


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    create_database(f"sqlite:///{path}", "unused")
    return path


@pytest.fixture
def uri(tmp_path: Path, empty_store: Path) -> str:
    path = tmp_path / "server" / "mlflow.db"
    path.parent.mkdir()
    shutil.copy(empty_store, path)
    create_database(f"sqlite:///{path}", EXPERIMENT)
    return f"sqlite:///{path}"


@pytest.fixture
def open_tracker(uri: str, tmp_path: Path) -> Iterator[Callable[..., MLflowTracker]]:
    opened: list[MLflowTracker] = []

    def make(**changes: Any) -> MLflowTracker:
        arguments: dict[str, Any] = {
            "uri": uri,
            "experiment": EXPERIMENT,
            "run_name": "demo",
            "params": {"train": {"lr": 1e-3}},
            "tags": {JOB_ID: "job-1", "node": "n1"},
            "run_dir": tmp_path / "run",
            "interval_s": 0.05,
        }
        opened.append(MLflowTracker(**(arguments | changes)))
        return opened[-1]

    yield make
    for tracker in opened:
        tracker.finish("KILLED")


def client(uri: str) -> Any:
    return mlflow.MlflowClient(tracking_uri=uri)


def runs(uri: str) -> list[Any]:
    there = client(uri)
    return list(there.search_runs([there.get_experiment_by_name(EXPERIMENT).experiment_id]))


def only_run(uri: str) -> Any:
    (run,) = runs(uri)
    return run


def history(uri: str, name: str) -> list[tuple[int, float]]:
    points = client(uri).get_metric_history(only_run(uri).info.run_id, name)
    return sorted((point.step, point.value) for point in points)


def test_all_trackers_keep_one_contract(tmp_path: Path, open_tracker: Callable[..., MLflowTracker]) -> None:
    file = tmp_path / "policy.json"
    file.write_text("{}")
    trackers: list[Tracker] = [NullTracker(), LocalTracker(tmp_path / "local"), open_tracker()]
    for tracker in trackers:
        tracker.log(1, {"loss": 1.0})
        tracker.artifact(file)
        tracker.finish("FINISHED")
    assert [row["loss"] for row in read_metrics(tmp_path / "local" / "metrics.jsonl")] == [1.0]


def test_run_gets_metrics_params_tags_artifacts_and_status(
    uri: str, tmp_path: Path, open_tracker: Callable[..., MLflowTracker]
) -> None:
    tracker = open_tracker(params={"train": {"lr": 1e-3, "batch": "auto"}, "data": {"train[0]": [{"path": "x"}]}})
    for step in range(1, 201):
        tracker.log(step, {"loss": 1 / step, "tokens per second!": 10.0 * step})
    (tmp_path / "run" / "job.yaml").write_text("name: demo\n")
    tracker.artifact(tmp_path / "run" / "job.yaml")
    tracker.artifact(tmp_path / "gone.txt")  # it vanished: not worth an error
    tracker.finish("FINISHED")

    run = only_run(uri)
    assert run.info.run_id == tracker.run_id
    assert run.info.run_name == "demo"
    assert run.info.status == "FINISHED"
    assert run.info.end_time >= run.info.start_time
    assert run.data.params["train.lr"] == "0.001"
    assert run.data.params["data.train_0_"] == '[{"path": "x"}]'
    assert run.data.tags["node"] == "n1"
    assert run.data.tags[JOB_ID] == "job-1"
    assert history(uri, "loss") == [(step, 1 / step) for step in range(1, 201)]
    assert len(history(uri, "tokens per second_")) == 200
    there = client(uri)
    assert [file.path for file in there.list_artifacts(run.info.run_id)] == ["job.yaml"]
    copy = there.download_artifacts(run.info.run_id, "job.yaml", str(tmp_path))
    assert Path(copy).read_text() == "name: demo\n"
    assert (tmp_path / "server" / "mlartifacts").is_dir()


def test_long_and_many_params(uri: str, tmp_path: Path, open_tracker: Callable[..., MLflowTracker]) -> None:
    params = {"template": "x" * 10_000, "files": {str(i): f"file-{i}" for i in range(300)}}
    open_tracker(params=params).finish("FINISHED")
    run = only_run(uri)
    assert run.data.params["template"] == "x" * 250
    assert run.data.params["files.299"] == "file-299"
    copy = Path(client(uri).download_artifacts(run.info.run_id, "params.json", str(tmp_path)))
    assert json.loads(copy.read_text()) == flat(params)
    assert run.data.params["config_sha256"] == hashlib.sha256(copy.read_bytes()).hexdigest()


def test_what_mlflow_refuses_does_not_hold_up_the_rest(
    uri: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    open_tracker: Callable[..., MLflowTracker],
) -> None:
    monkeypatch.setattr("lazytrain.jobs.tracking.forwarder._allowed", lambda name: name)
    tracker = open_tracker(tags={JOB_ID: "job-1", "not@allowed": "x"})
    tracker.log(1, {"loss": 1.0})
    tracker.finish("FINISHED")
    assert history(uri, "loss") == [(1, 1.0)]
    assert "not@allowed" in caplog.text


def test_odd_names_are_made_acceptable(uri: str, open_tracker: Callable[..., MLflowTracker]) -> None:
    tracker = open_tracker(tags={JOB_ID: "job-1", "gpu@node": "x" * 9000}, params={"a" * 300: 1, "b[0]": 2})
    tracker.log(1, {"loss (%)": 1.0})
    tracker.finish("FINISHED")
    run = only_run(uri)
    assert run.data.tags["gpu_node"] == "x" * 5000
    assert run.data.params["a" * 250] == "1"
    assert run.data.params["b_0_"] == "2"
    assert history(uri, "loss ___") == [(1, 1.0)]


def test_values_that_are_not_finite_are_counted_not_sent(uri: str, open_tracker: Callable[..., MLflowTracker]) -> None:
    tracker = open_tracker()
    for step, value in enumerate((1.0, math.nan, math.inf, 0.5), start=1):
        tracker.log(step, {"loss": value})
    tracker.finish("FINISHED")
    assert history(uri, "loss") == [(1, 1.0), (4, 0.5)]
    assert history(uri, "nonfinite/loss") == [(2, 1.0), (3, 2.0)]
    assert only_run(uri).data.tags["nonfinite/loss"] == "true"


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_status_is_what_was_said_first(uri: str, status: Any, open_tracker: Callable[..., MLflowTracker]) -> None:
    tracker = open_tracker()
    tracker.log(1, {"loss": 1.0})
    tracker.finish(status)
    tracker.finish("FINISHED" if status != "FINISHED" else "FAILED")
    assert only_run(uri).info.status == status
    assert only_run(uri).info.end_time


def test_status_that_somebody_else_set_is_kept(uri: str, tmp_path: Path) -> None:
    sender = forwarder(uri, tmp_path)
    sender.send()
    client(uri).set_terminated(sender.record.run_id, "KILLED")
    sender.record.status = "FINISHED"
    sender.send()
    assert only_run(uri).info.status == "KILLED"


def forwarder(uri: str, run_dir: Path, **changes: Any) -> Forwarder:
    """The tracker's forwarder without its thread."""
    options: dict[str, Any] = {"params": {}, "tags": {JOB_ID: "job-1"}} | changes
    record = RunRecord.open(run_dir / "mlflow_run.json", uri=uri, experiment=EXPERIMENT, run_name="demo", **options)
    return Forwarder(record, run_dir / "metrics.jsonl")


KILLED = ["created", "described", "sent", "forwarded", "logged"]

ATTEMPTS = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import mlflow.store.tracking.sqlalchemy_store
from lazytrain.jobs.tracking.metric_log import MetricLog
from lazytrain.jobs.tracking.record import RunRecord
from test_tracking import KILLED, forwarder

def attempt(directory, where):
    die = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
    create = mlflow.MlflowClient.create_run
    log = MetricLog(directory / "run" / "metrics.jsonl")
    sender = forwarder(f"sqlite:///{{directory}}/mlflow.db", directory / "run", params={{"lr": 1, "batch": 8}})
    for step in range(1, 6):
        log.append(step, {{"loss": float(step)}})
    if where == "created":
        mlflow.MlflowClient.create_run = lambda *a, **k: (create(*a, **k), die())
    if where == "described":
        Forwarder = type(sender)
        Forwarder._send_metrics = die
    sender.send()
    for step in range(6, 13):
        log.append(step, {{"loss": float(step)}})
    if where == "sent":
        RunRecord.save = die
    if where != "logged":
        sender.send()
    die()

for where in KILLED:
    child = os.fork()
    if child == 0:
        attempt(Path({root!r}) / where, where)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (where, status)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """A store and a run directory for each point at which a process was killed, at step 12 at the latest."""
    root = tmp_path_factory.mktemp("killed")
    for where in KILLED:
        (root / where).mkdir()
        shutil.copy(empty_store, root / where / "mlflow.db")
    script = ATTEMPTS.format(tests=str(Path(__file__).parent), root=str(root))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
    return root


@pytest.mark.parametrize("where", KILLED)
def test_killed_and_resumed_run_has_every_step_once(
    killed: Path, where: str, open_tracker: Callable[..., MLflowTracker]
) -> None:
    """Resumed from a checkpoint a few steps before the kill: one run, steps 1 to 20 once."""
    uri = f"sqlite:///{killed / where}/mlflow.db"
    tracker = open_tracker(uri=uri, run_dir=killed / where / "run", params={"lr": 1, "batch": 16})
    reached = 5 if where in ("created", "described") else 12
    for step in range(reached - 2, 21):
        tracker.log(step, {"loss": float(step)})
    tracker.finish("FINISHED")
    assert history(uri, "loss") == [(step, float(step)) for step in range(1, 21)]
    run = only_run(uri)
    assert run.info.status == "FINISHED"
    assert run.data.tags["lazytrain.attempt"] == "2"
    described = where != "created"
    assert run.data.params["batch"] == ("8" if described else "16")
    assert run.data.tags.get("changed.attempt2") == ("batch, config_sha256" if described else None)


def test_finished_run_that_is_resumed_is_running_again(uri: str, tmp_path: Path) -> None:
    for attempt, status in ((1, "FAILED"), (2, "FINISHED")):
        log = MetricLog(tmp_path / "metrics.jsonl")
        log.append(attempt, {"loss": float(attempt)})
        sender = forwarder(uri, tmp_path)
        sender.send()
        assert only_run(uri).info.status == "RUNNING"
        sender.record.status = status
        sender.send()
        assert only_run(uri).info.status == status
    assert history(uri, "loss") == [(1, 1.0), (2, 2.0)]


def test_lost_run_directory_finds_its_run_by_tag(
    uri: str, tmp_path: Path, open_tracker: Callable[..., MLflowTracker]
) -> None:
    first = open_tracker()
    for step in range(1, 13):
        first.log(step, {"loss": float(step)})
    first.finish("FAILED")
    second = open_tracker(run_dir=tmp_path / "elsewhere")
    for step in range(11, 21):
        second.log(step, {"loss": float(step)})
    second.finish("FINISHED")
    assert history(uri, "loss") == [(step, float(step)) for step in range(1, 21)]
    assert only_run(uri).data.tags["lazytrain.attempt"] == "2"


def test_lost_answer_to_create_leaves_one_run(
    uri: str, monkeypatch: pytest.MonkeyPatch, open_tracker: Callable[..., MLflowTracker]
) -> None:
    create, calls = mlflow.MlflowClient.create_run, []

    def lossy(*args: Any, **kwargs: Any) -> Any:
        calls.append(create(*args, **kwargs))
        if len(calls) == 1:
            raise ConnectionError("answer lost")
        return calls[-1]

    monkeypatch.setattr(mlflow.MlflowClient, "create_run", lossy)
    tracker = open_tracker()
    tracker.log(1, {"loss": 1.0})
    tracker.finish("FINISHED")
    assert len(calls) == 1
    assert only_run(uri).info.status == "FINISHED"
    assert history(uri, "loss") == [(1, 1.0)]


def test_jobs_without_an_id_are_separate_runs(
    uri: str, tmp_path: Path, open_tracker: Callable[..., MLflowTracker]
) -> None:
    for name in ("a", "b", "a"):
        open_tracker(tags={}, run_dir=tmp_path / name).finish("FINISHED")
    assert len(runs(uri)) == 2


def test_another_store_gets_the_whole_run(
    uri: str, tmp_path: Path, empty_store: Path, open_tracker: Callable[..., MLflowTracker]
) -> None:
    first = open_tracker()
    first.log(1, {"loss": 1.0})
    first.finish("FAILED")
    shutil.copy(empty_store, tmp_path / "other.db")
    other = f"sqlite:///{tmp_path}/other.db"
    second = open_tracker(uri=other)
    second.log(2, {"loss": 2.0})
    second.finish("FINISHED")
    assert history(other, "loss") == [(1, 1.0), (2, 2.0)]
    assert history(uri, "loss") == [(1, 1.0)]


def test_outage_costs_training_nothing_and_nothing_is_missing_afterwards(
    uri: str, monkeypatch: pytest.MonkeyPatch, open_tracker: Callable[..., MLflowTracker]
) -> None:
    send, down = mlflow.MlflowClient.log_batch, [True]

    def flaky(*args: Any, **kwargs: Any) -> Any:
        if down[0]:
            raise ConnectionError("no route to host")
        return send(*args, **kwargs)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", flaky)
    tracker = open_tracker(interval_s=0.01)
    for step in range(1, 501):
        tracker.log(step, {"loss": float(step), "norm": 1.0})
    down[0] = False
    for step in range(501, 601):
        tracker.log(step, {"loss": float(step), "norm": 1.0})
    tracker.finish("FINISHED")
    assert history(uri, "loss") == [(step, float(step)) for step in range(1, 601)]
    assert only_run(uri).info.status == "FINISHED"


class Broken(http.server.BaseHTTPRequestHandler):
    """Answers every request with an error of its own."""

    def answer(self) -> None:
        self.send_error(500)

    do_GET = do_POST = do_PATCH = answer  # noqa: N815

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def broken_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def senders(monkeypatch: pytest.MonkeyPatch) -> set[threading.Thread]:
    """Who speaks to MLflow, and so may have to wait for it."""
    found, send = set(), Forwarder.send

    def noted(self: Forwarder) -> None:
        found.add(threading.current_thread())
        send(self)

    monkeypatch.setattr(Forwarder, "send", noted)
    return found


@pytest.mark.parametrize("server", ["nobody", "silent", "broken"])
def test_server_that_never_answers_delays_only_the_end_and_only_so_long(
    tmp_path: Path,
    open_tracker: Callable[..., MLflowTracker],
    server: str,
    broken_server: str,
    senders: set[threading.Thread],
) -> None:
    """Nobody listens; somebody takes the call and says nothing; every answer is an error 500."""
    silent = socket.create_server(("127.0.0.1", 0))
    addresses = {"nobody": "http://127.0.0.1:9", "broken": broken_server}
    dead = addresses.get(server, f"http://127.0.0.1:{silent.getsockname()[1]}")
    monkey = pytest.MonkeyPatch()
    monkey.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    tracker = open_tracker(uri=dead, finish_timeout_s=0.5)
    waited, join = [], tracker._thread.join
    monkey.setattr(tracker._thread, "join", lambda timeout=None: (waited.append(timeout), join(timeout)))
    for step in range(1, 1001):
        tracker.log(step, {"loss": float(step)})
    tracker.finish("FINISHED")
    assert waited == [0.5]
    assert senders == {tracker._thread}
    assert tracker.run_id is None
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1000
    with pytest.raises(LazytrainError, match="cannot forward"):
        sync_run(tmp_path / "run")
    join()
    silent.close()
    monkey.undo()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"uri": "x"}'])
def test_a_damaged_record_is_begun_anew_and_the_run_found_by_its_tag(
    uri: str, tmp_path: Path, content: str, open_tracker: Callable[..., MLflowTracker]
) -> None:
    first = open_tracker()
    first.log(1, {"loss": 1.0})
    first.finish("FINISHED")
    (tmp_path / "run" / "mlflow_run.json").write_text(content)
    second = open_tracker()
    second.log(2, {"loss": 2.0})
    second.finish("FINISHED")
    assert history(uri, "loss") == [(1, 1.0), (2, 2.0)]


def test_what_an_outage_left_is_sent_later_with_the_true_status(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_tracker: Callable[..., MLflowTracker]
) -> None:
    def down(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no route to host")

    file = tmp_path / "run" / "policy.json"
    with monkeypatch.context() as outage:
        outage.setattr(mlflow.MlflowClient, "search_runs", down)
        tracker = open_tracker(finish_timeout_s=0.2)
        file.write_text("{}")
        tracker.log(1, {"loss": 1.0})
        tracker.artifact(file)
        tracker.finish("FAILED")
        tracker._thread.join()
    assert runs(uri) == []
    sync_run(tmp_path / "run")
    run = only_run(uri)
    assert run.info.status == "FAILED"
    assert history(uri, "loss") == [(1, 1.0)]
    assert [item.path for item in client(uri).list_artifacts(run.info.run_id)] == ["policy.json"]
    sync_run(tmp_path / "run")
    assert history(uri, "loss") == [(1, 1.0)]


def test_a_database_that_is_locked_away_costs_training_nothing(
    uri: str, open_tracker: Callable[..., MLflowTracker], senders: set[threading.Thread]
) -> None:
    """A real outage: another process holds the file, so that writes wait or fail; then it lets go."""
    tracker = open_tracker(interval_s=0.01, finish_timeout_s=60)
    for step in range(1, 51):
        tracker.log(step, {"loss": float(step)})
    with contextlib.closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as thief:
        thief.execute("BEGIN EXCLUSIVE")
        for step in range(51, 1001):
            tracker.log(step, {"loss": float(step)})
        thief.rollback()
    for step in range(1001, 1051):
        tracker.log(step, {"loss": float(step)})
    tracker.finish("FINISHED")
    assert senders == {tracker._thread}
    assert history(uri, "loss") == [(step, float(step)) for step in range(1, 1051)]
    assert only_run(uri).info.status == "FINISHED"


def test_six_runs_at_once_lose_nothing(uri: str, tmp_path: Path, open_tracker: Callable[..., MLflowTracker]) -> None:
    """All write to one SQLite file, in requests of many points."""
    trackers = [
        open_tracker(tags={JOB_ID: f"job-{n}"}, run_dir=tmp_path / f"run{n}", interval_s=0.01, finish_timeout_s=60)
        for n in range(6)
    ]
    for step in range(1, 201):
        for tracker in trackers:
            tracker.log(step, {"loss": float(step)})
    for tracker in trackers:
        tracker.finish("FINISHED")
    assert len(runs(uri)) == 6
    for tracker in trackers:
        points = client(uri).get_metric_history(tracker.run_id, "loss")
        assert sorted(point.step for point in points) == list(range(1, 201))
    assert {run.info.status for run in runs(uri)} == {"FINISHED"}


def test_a_run_that_was_killed_is_known_to_have_failed(uri: str, tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "metrics.jsonl")
    log.append(1, {"loss": 1.0})
    forwarder(uri, tmp_path).send()  # and then its process is gone
    assert only_run(uri).info.status == "RUNNING"
    assert end_lost_run(tmp_path)
    assert only_run(uri).info.status == "FAILED"
    assert only_run(uri).info.end_time
    assert not end_lost_run(tmp_path), "that is said once"
    assert not end_lost_run(tmp_path / "nothing")
    again = forwarder(uri, tmp_path)
    again.send()
    assert only_run(uri).info.status == "RUNNING"
    forwarder(uri, tmp_path).send()  # killed again, and started again at once
    assert only_run(uri).data.tags["lazytrain.lost_attempt2"] == "its process ended without a word"
    assert "lazytrain.lost_attempt1" not in only_run(uri).data.tags


def test_large_backlog_goes_in_requests_that_mlflow_accepts(uri: str, tmp_path: Path) -> None:
    tracker = LocalTracker(tmp_path / "run")
    for step in range(1, 301):
        tracker.log(step, {f"metric{i}": float(step) for i in range(12)})
    tracker.finish("FINISHED")
    sender = forwarder(uri, tmp_path / "run")
    sender.send()
    for i in (0, 11):
        assert len(history(uri, f"metric{i}")) == 300
    assert sender.record.offset == (tmp_path / "run" / "metrics.jsonl").stat().st_size
    assert sender.record.step == 300


RACE = """
import os, sys
import mlflow.store.tracking.sqlalchemy_store
from lazytrain.jobs.tracking import create_database
racers = []
for _ in range(4):
    racers.append(os.fork())
    if racers[-1] == 0:
        create_database(*sys.argv[1:])
        os._exit(0)
assert [os.waitpid(racer, 0)[1] for racer in racers] == [0] * 4
"""


def test_many_processes_may_create_the_same_store(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    subprocess.run([sys.executable, "-c", RACE, uri, EXPERIMENT], check=True, timeout=200)
    assert len(client(uri).search_experiments()) == 2  # MLflow's own "Default" and ours


def test_job_ids_that_could_reach_into_the_query_are_refused(open_tracker: Callable[..., MLflowTracker]) -> None:
    with pytest.raises(InputError, match="job id"):
        open_tracker(tags={JOB_ID: "x' or '1'='1"})


def test_package_loads_without_mlflow(tmp_path: Path) -> None:
    """A GPU image has no mlflow; training with the other trackers must work there."""
    script = (
        "import sys; sys.modules['mlflow'] = None\n"
        "from lazytrain.jobs.tracking import LocalTracker, MLflowTracker, NullTracker\n"
        "NullTracker().log(1, {'loss': 1.0}); LocalTracker(sys.argv[1]).log(1, {'loss': 1.0})\n"
        "try: MLflowTracker('sqlite:///x.db', 'e', 'r', {}, {}, sys.argv[1])\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("InputError mlflow is not installed"), done.stderr


def test_telemetry_is_off_and_globals_untouched(uri: str, open_tracker: Callable[..., MLflowTracker]) -> None:
    before = mlflow.get_tracking_uri()
    open_tracker().finish("FINISHED")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert mlflow.get_tracking_uri() == before
    assert importlib.import_module("mlflow").active_run() is None


def test_what_a_deleted_run_missed_arrives_when_it_is_restored(
    uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sender = forwarder(uri, tmp_path)
    metrics = MetricLog(tmp_path / "metrics.jsonl")
    metrics.append(1, {"loss": 3.0})
    sender.send()
    run_id = sender.record.run_id
    client(uri).delete_run(run_id)
    metrics.append(2, {"loss": 2.0})
    for again in (sender, forwarder(uri, tmp_path)):  # in the same process, and in the next attempt's
        with pytest.raises(LazytrainError, match=f"{run_id} was deleted") as refused:
            again.send()
        assert run_id in refused.value.hint
    client(uri).restore_run(run_id)
    again.record.status = "FINISHED"
    again.send()
    assert history(uri, "loss") == [(1, 3.0), (2, 2.0)]
    assert only_run(uri).info.status == "FINISHED"


def test_a_run_that_mlflow_has_lost_is_sent_again_as_a_whole(uri: str, tmp_path: Path) -> None:
    """``mlflow gc`` took it, or the store was set up anew under the same name."""
    sender = forwarder(uri, tmp_path)
    metrics = MetricLog(tmp_path / "metrics.jsonl")
    metrics.append(1, {"loss": 3.0})
    sender.send()
    with contextlib.closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database, database:
        for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
            database.execute(f"DELETE FROM {table}")
    metrics.append(2, {"loss": 2.0})
    forwarder(uri, tmp_path, params={"lr": 0.5}).send()
    assert history(uri, "loss") == [(1, 3.0), (2, 2.0)]
    assert only_run(uri).data.params["lr"] == "0.5"


def test_a_deleted_experiment_is_named_and_its_runs_arrive_when_it_is_restored(uri: str, tmp_path: Path) -> None:
    experiment = client(uri).get_experiment_by_name(EXPERIMENT).experiment_id
    client(uri).delete_experiment(experiment)
    sender = forwarder(uri, tmp_path)
    with pytest.raises(LazytrainError, match=f"experiment {EXPERIMENT} was deleted") as refused:
        sender.send()
    assert f"--experiment-id {experiment}" in refused.value.hint
    client(uri).restore_experiment(experiment)
    sender.send()
    assert only_run(uri).info.run_id == sender.record.run_id
