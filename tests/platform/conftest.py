"""What tests of the platform share: a tiny job, and the API in this process."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from lazytrain.jobs.errors import LazytrainError
from lazytrain.platform.admission import Admission, AdmissionOrder
from lazytrain.platform.api import create_app
from lazytrain.platform.demo import inputs
from lazytrain.platform.settings import Settings
from lazytrain.platform.store import Role, Store


@pytest.fixture
def tiny_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts_are_measured_once: None) -> Path:
    """The demo's job file with a hundredth of its rows."""
    monkeypatch.setattr(inputs, "_TRAIN_ROWS", 240)
    monkeypatch.setattr(inputs, "_EVAL_ROWS", 8)
    return inputs.write_inputs(tmp_path / "job", seed=0)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with empty tables, to be copied: making them takes a quarter of a second."""
    path = tmp_path_factory.mktemp("database") / "store.db"
    Store(f"sqlite:///{path}").close()
    return path


@dataclass
class InstantPlanner:
    """Answers at once, with what the test put here."""

    answer: Admission | LazytrainError | None = None
    found: dict[str, Admission | LazytrainError] = field(default_factory=dict)

    def submit(self, order: AdmissionOrder) -> None:
        assert self.answer is not None
        self.found[order.job] = self.answer

    def results(self) -> dict[str, Admission | LazytrainError]:
        found, self.found = self.found, {}
        return found

    def close(self) -> None:
        pass


@dataclass
class Service:
    """The API and what is behind it."""

    store: Store
    settings: Settings
    planner: InstantPlanner
    folder: Path
    tokens: dict[str, str]
    app: Any

    def client(self, user: str | None = "ada", **headers: str) -> TestClient:
        """A client with the user's token."""
        auth = {"Authorization": f"Bearer {self.tokens[user]}"} if user else {}
        return TestClient(
            self.app, base_url="http://127.0.0.1:8470", headers={**auth, **headers}, raise_server_exceptions=False
        )

    def spec(self, **changes: Any) -> dict[str, Any]:
        """A job file that is allowed."""
        return {
            "name": "tiny",
            "model": {"path": str(self.folder / "model")},
            "data": {"train": [{"path": str(self.folder / "rows.jsonl")}]},
            "output": {"dir": str(self.folder / "out")},
            **changes,
        }

    def submit(self, user: str = "ada", headers: Mapping[str, str] | None = None, **changes: Any) -> Any:
        """Answer to a submission."""
        body = {"spec": self.spec(**changes)}
        return self.client(user).post("/api/v1/jobs", json=body, headers=dict(headers or {}))


@pytest.fixture
def new_service(tmp_path: Path, empty_database: Path) -> Iterator[Callable[..., Service]]:
    opened: list[Store] = []

    def make(**settings: Any) -> Service:
        shutil.copy(empty_database, tmp_path / "store.db")
        store = Store(f"sqlite:///{tmp_path / 'store.db'}")
        opened.append(store)
        tokens = {}
        for name, role in (
            ("ada", Role.SUBMITTER),
            ("ben", Role.SUBMITTER),
            ("vic", Role.VIEWER),
            ("root", Role.ADMIN),
        ):
            store.people.add(name, role, 0.0)
            tokens[name] = store.people.new_token(name, 0.0)
        found = Settings(home=tmp_path / "home", roots=(str(tmp_path / "lab"),), **settings)
        planner = InstantPlanner()
        (tmp_path / "lab").mkdir(exist_ok=True)
        app = create_app(store, found, planner)
        return Service(store, found, planner, tmp_path / "lab", tokens, app)

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def service(new_service: Callable[..., Service]) -> Service:
    return new_service(requests_per_minute=100_000)


@pytest.fixture
def served(service: Service) -> Iterator[str]:
    """URL at which the service answers over a real socket."""
    config = uvicorn.Config(service.app, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    ready = threading.Event()
    startup = server.startup

    async def started(*arguments: Any, **options: Any) -> None:
        await startup(*arguments, **options)
        ready.set()

    server.startup = started  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(20)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)
