"""A lab in a box: the pages over a real API on a fresh database, with nodes and jobs in any state."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from lazytrain.dashboards.service import with_pages
from lazytrain.jobs.lifecycle import JobState
from lazytrain.jobs.policy import Boundary, LayerPolicy, Policy, Predicted
from lazytrain.jobs.timeline import Span, Timeline
from lazytrain.platform.admission import STAGE, Admission, Found, Way
from lazytrain.platform.api import create_app
from lazytrain.platform.api.submission import new_job
from lazytrain.platform.artifacts import JobFiles, write_json
from lazytrain.platform.settings import Settings
from lazytrain.platform.store import Lease, Move, Node, Role, Store
from lazytrain.platform.store.jobs import _row
from lazytrain.schedulers.hardware import MEASUREMENT

HOST = "http://127.0.0.1:8470"
_S = JobState
WAYS: dict[JobState, tuple[JobState, ...]] = {
    _S.QUEUED: (),
    _S.STARTING: (_S.STARTING,),
    _S.RUNNING: (_S.STARTING, _S.RUNNING),
    _S.PAUSING: (_S.STARTING, _S.RUNNING, _S.PAUSING),
    _S.PAUSED: (_S.STARTING, _S.RUNNING, _S.PAUSING, _S.PAUSED),
    _S.STOPPING: (_S.STARTING, _S.RUNNING, _S.STOPPING),
    _S.RECOVERING: (_S.STARTING, _S.RUNNING, _S.RECOVERING),
    _S.SUCCEEDED: (_S.STARTING, _S.RUNNING, _S.SUCCEEDED),
    _S.FAILED: (_S.STARTING, _S.RUNNING, _S.FAILED),
    _S.STOPPED: (_S.STOPPED,),
    _S.REJECTED: (_S.REJECTED,),
}
"""The moves from the queue to each state."""
PROFILE = {
    "name": "a", "kind": "H800", "device": "cuda", "gpu_memory_bytes": 80 << 30, "matmul_flops": {"bfloat16": 7e14},
    "efficiency": 0.6, "h2d_bytes_s": 5e10, "d2h_bytes_s": 5e10, "host_memory_bytes": 512 << 30, "host_bytes_s": 2e11,
    "update_parameters_s": 3e9, "nvme_bytes": 2 << 40, "nvme_read_bytes_s": 6e9, "nvme_write_bytes_s": 4e9,
    "measurement": MEASUREMENT,
}  # fmt: skip


@dataclass
class InstantPlanner:
    """Answers at once, with what the test put here; remembers what it was asked."""

    answer: Found | None = None
    asked: list[Any] = field(default_factory=list)
    found: dict[str, Found] = field(default_factory=dict)

    def submit(self, order: Any) -> None:
        assert self.answer is not None
        self.asked.append(order)
        self.found[order.job] = self.answer

    def results(self) -> dict[str, Found]:
        found, self.found = self.found, {}
        return found

    def close(self) -> None:
        pass


@dataclass
class Lab:
    """The service and what is behind it."""

    store: Store
    settings: Settings
    planner: InstantPlanner
    folder: Path
    tokens: dict[str, str]
    api: Any
    app: Any
    lease: Lease

    def stranger(self) -> TestClient:
        """A browser that nobody has signed in with."""
        return TestClient(self.app, base_url=HOST, headers={"Origin": HOST})

    def browser(self, user: str = "ada") -> TestClient:
        """A browser that the user has signed in with."""
        client = self.stranger()
        answer = client.post("/login", data={"token": self.tokens[user]}, follow_redirects=False)
        assert answer.status_code == 303, answer.text
        return client

    def node(self, name: str = "a", *, profile: Mapping[str, Any] = PROFILE, **changes: Any) -> None:
        """A node that is there and measured."""
        values = {"address": "10.0.0.1", "kind": "H800", "device": "cuda", "cpus": 64.0, "gpus": 2.0, "alive": True}
        known = [node for node in self.store.nodes.list() if node.alive]
        self.store.nodes.see([*known, Node(name=name, **{**values, **changes})], 1e9)
        if profile:
            self.store.nodes.set_profile(name, profile)

    def spec(self, **changes: Any) -> dict[str, Any]:
        """A job file that is allowed."""
        return {
            "name": "tiny",
            "model": {"path": str(self.folder / "model")},
            "data": {"train": [{"path": str(self.folder / "rows.jsonl")}]},
            "output": {"dir": str(self.folder / "out")},
            **changes,
        }

    def job(
        self,
        name: str = "tiny",
        state: JobState = JobState.QUEUED,
        *,
        user: str = "ada",
        sentence: str = "because",
        reason: str = "reason",
        at: float = 1e9,
        outcome: Mapping[str, Any] | None = None,
        **spec: Any,
    ) -> str:
        """A job in any state; its id."""
        made = new_job(self.spec(name=name, **spec), (), user, None, self.settings)
        job, _ = self.store.jobs.create(made, at)
        for step, to in enumerate(WAYS[state]):
            changes: dict[str, Any] = {}
            if to is _S.STARTING:
                changes = {"attempt": job.attempt + 1, "node": "a", "gpu": "0", "claim": f"{job.id}-c"}
            if to is _S.RUNNING:
                changes = {"started_at": at + 10}
            if outcome is not None and to is WAYS[state][-1]:
                changes["outcome"] = dict(outcome)
            job = self.store.jobs.move(job, Move(to, reason, sentence), at + 10 * step, self.lease, **changes)
        if state is _S.QUEUED:
            self.store.jobs.annotate(job, at, self.lease, reason=reason, sentence=sentence)
        return job.id

    def many(self, count: int) -> None:
        """So many jobs in the queue, in one transaction."""
        made = (new_job(self.spec(name=f"job-{k:04d}"), (), "ada", None, self.settings) for k in range(count))
        with self.store.jobs._db.write() as session:
            session.add_all([_row(job, 1e9 + k) for k, job in enumerate(made)])

    def files(self, job: str) -> JobFiles:
        """The job's folder, which is its own."""
        files = JobFiles(self.store.jobs.get(job).run_dir)
        files.claim(job)
        return files

    def admit(self, job: str, *, host_bytes: int = 0, nvme_bytes: int = 0) -> None:
        """The job has been planned."""
        option = {"tokens_per_s": 10.0, "work_tokens": 100.0, "startup_s": 5.0}
        way = Way(option={**option, "host_bytes": host_bytes, "nvme_bytes": nvme_bytes}, policy={}, device={})
        found = Admission(batch=8, steps=100, ways={"H800": way}, limits={}).model_dump(mode="json")
        self.store.jobs.finish_stage(self.store.jobs.get(job), STAGE, found, 1e9, self.lease)

    def train(self, job: str, steps: int = 20, total: int = 100) -> None:
        """The job has taken so many steps."""
        files = self.files(job)
        attempt = files.attempt(self.store.jobs.get(job).attempt)
        write_json(attempt.beat, {"beat": 1, "step": steps, "total_steps": total, "step_s": 0.5}, durable=False)
        attempt.log.write_text("".join(f"step {k} of {total}\n" for k in range(1, steps + 1)))
        with files.metrics.open("w") as log:
            for step in range(1, steps + 1):
                log.write(json.dumps(metrics_row(step)) + "\n")
        small_policy().save(files.policy)
        write_json(files.timeline, {"step": 3, **small_timeline().to_dict()}, durable=False)


def metrics_row(step: int) -> dict[str, float]:
    """A row of the metric log."""
    loss = 0.4 + 2.2 * math.exp(-step / 40) + 0.05 * math.sin(step * 1.7)
    return {
        "step": step, "time": 1e9 + step, "loss": loss, "learning_rate": 1e-5 * min(1, step / 10),
        "grad_norm": 1 + math.exp(-step / 9), "tokens_per_s": 8000.0 + 150 * math.sin(step), "step_s": 0.5,
        "predicted_step_s": 0.48, "gpu_bytes": 6.5e10, "host_bytes": 2.1e11,
    }  # fmt: skip


def small_policy(layers: int = 4) -> Policy:
    """A policy with something of everything."""
    homes = ["host", *(["gpu", "recompute", "nvme", "host"] * layers)[: layers - 1], "gpu"]
    return Policy(
        model_digest="m",
        micro_batch=8,
        sequence_length=1024,
        boundaries=tuple(Boundary(index=i, home=home) for i, home in enumerate(homes)),  # type: ignore[arg-type]
        layers=tuple(LayerPolicy(index=i, internals="all" if i == layers - 1 else "none") for i in range(layers)),
        predicted=Predicted(
            step_s=0.48, tokens_per_s=8300.0, tflops_6n=310.0, compute_units=3.6, peak_gpu_bytes=66 << 30,
            peak_host_bytes=200 << 30, nvme_bytes=0, host_bytes_per_parameter=8.03, exposed_s={"h2d": 0.02},
        ),
    )  # fmt: skip


def small_timeline() -> Timeline:
    """Loads and the forward of four layers."""
    spans = [Span(f"load.{i}", "h2d", 0.1 * i, 0.1 * i + 0.09, 10**9) for i in range(4)]
    spans += [Span(f"forward.{i}", "compute", 0.1 * i + 0.1, 0.1 * i + 0.19, 0) for i in range(4)]
    return Timeline(spans, 0.5, {"h2d": 0.1}, {"gpu": 66 << 30})


@dataclass(frozen=True)
class Template:
    """A database with four people, to be copied: making one takes a quarter of a second."""

    path: Path
    tokens: dict[str, str]
    lease: Lease


def make_template(folder: Path) -> Template:
    """One user of each role, and a second one who submits."""
    path = folder / "store.db"
    store = Store(f"sqlite:///{path}")
    roles = {"ada": Role.SUBMITTER, "ben": Role.SUBMITTER, "vic": Role.VIEWER, "root": Role.ADMIN}
    tokens = {}
    for name, role in roles.items():
        store.people.add(name, role, 0.0)
        tokens[name] = store.people.new_token(name, 0.0)
    lease = store.leases.take("controller", "me", 0.0, 1e12)
    assert lease is not None
    store.close()
    return Template(path, tokens, lease)


def make_lab(folder: Path, template: Template | None = None, **settings: Any) -> Lab:
    """A lab in ``folder``."""
    template = template or make_template(folder)
    shutil.copy(template.path, folder / "copy.db")
    store = Store(f"sqlite:///{folder / 'copy.db'}")
    found = Settings(home=folder / "home", roots=(str(folder / "lab"),), **{"requests_per_minute": 100_000, **settings})
    (folder / "lab").mkdir(exist_ok=True)
    planner = InstantPlanner()
    api = create_app(store, found, planner)
    return Lab(store, found, planner, folder / "lab", template.tokens, api, with_pages(api, found), template.lease)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return make_template(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def new_lab(tmp_path: Path, template: Template) -> Iterator[Callable[..., Lab]]:
    opened: list[Lab] = []

    def make(**settings: Any) -> Lab:
        opened.append(make_lab(tmp_path, template, **settings))
        return opened[-1]

    yield make
    for lab in opened:
        lab.store.close()


@pytest.fixture
def lab(new_lab: Callable[..., Lab]) -> Lab:
    return new_lab()


@pytest.fixture
def controlled(lab: Lab) -> Lab:
    """A lab whose requests are answered at once, as a controller would."""
    ask = lab.store.jobs.ask

    def answered(*arguments: Any, **options: Any) -> Any:
        numbers = ask(*arguments, **options)
        lab.store.jobs.answer_all(dict.fromkeys(numbers, ""), 1e9)
        return numbers

    lab.store.jobs.ask = answered  # type: ignore[method-assign]
    return lab
