"""Each role runs without the packages that its image leaves out (``deploy/images``)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.artifacts import JobFiles, read_json, write_json
from lazytrain.platform.cluster.runs import RunOrder
from lazytrain.platform.planning import facts_of, find_model

ROOT = Path(__file__).parents[2]
TRAINING = ("torch", "transformers", "datasets", "bitsandbytes", "peft", "accelerate")
SERVICE = ("sqlalchemy", "alembic", "psycopg", "ortools", "fastapi", "starlette", "uvicorn")


def without(packages: tuple[str, ...], script: str, *arguments: str) -> str:
    """What a script prints in a process that has none of these packages."""
    hide = f"import sys\nsys.modules.update(dict.fromkeys({packages!r}))\n"
    command = [sys.executable, "-c", hide + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules(*folders: str) -> list[str]:
    """Every module below these folders and files of the source."""
    found = []
    for folder in folders:
        path = ROOT / folder
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        names = (
            ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if "migrations" not in file.parts
        )
        found += [f"lazytrain.{name.removesuffix('.__init__')}" for name in names]
    return found


SERVER = """
import importlib, json
from pathlib import Path
from starlette.testclient import TestClient
for name in sys.argv[2:]: importlib.import_module(name)
from lazytrain.platform.api import create_app
from lazytrain.platform.settings import Settings
from lazytrain.platform.store import Role, Store
home = Path(sys.argv[1])
store = Store(f"sqlite:///{home / 'store.db'}")
store.people.add("ada", Role.ADMIN, 0.0)
token = store.people.new_token("ada", 0.0)
client = TestClient(create_app(store, Settings(home=home), None), base_url="http://127.0.0.1:8470")
print(client.get("/api/v1/jobs", headers={"Authorization": f"Bearer {token}"}).text)
"""


def test_the_server_starts_and_answers_without_torch(tmp_path: Path) -> None:
    """Only its planner, a process of its own, measures models."""
    wanted = modules("platform/api", "platform/controller", "platform/store", "platform/admission/planner")
    wanted += modules("platform/client", "platform/supervisor", "platform/cli/app", "dashboards")
    assert len(wanted) > 30
    assert json.loads(without(TRAINING, SERVER, str(tmp_path), *wanted))["jobs"] == []


WORKER = """
import importlib
from pathlib import Path
for name in ("cluster.run_host", "cluster.profiling", "cluster.survey", "probe"):
    importlib.import_module(f"lazytrain.platform.{name}")
from lazytrain.platform.cluster.run_process import main
main(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_worker_trains_without_database_solver_and_api(tiny_job: Path, tmp_path: Path) -> None:
    """It is handed its plan, so it solves nothing; its figures go through files, so it needs no database."""
    spec = load_spec(tiny_job, ("train.max_steps=2", "train.batch=4", "evaluate.limit=2", "plan.nvme=null"))
    facts = facts_of(find_model(spec.model.path), batch=4, length=48, dtype="float32")
    policy = Policy.from_homes(facts, ["host"] * len(facts.layers) + ["gpu"])
    order = RunOrder(
        job="j-0000000001",
        claim="c",
        attempt=1,
        spec=spec.model_dump(mode="json"),
        policy=policy.model_dump(mode="json", by_alias=True),
        device={"kind": "emulated", "memory_bytes": 1 << 30},
        run_dir=tmp_path / "run",
        node="a",
        gpu="0",
        cpus=1,
    )
    files = JobFiles(order.run_dir).attempt(1)
    write_json(files.order, order.to_dict())
    without(SERVICE, WORKER, str(files.order))
    outcome = read_json(files.outcome)
    assert outcome is not None and (outcome["how"], outcome["step"]) == ("done", 2), outcome


def test_the_worker_image_leaves_out_what_is_hidden_here() -> None:
    listed = (ROOT / "deploy" / "images" / "worker.txt").read_text(encoding="utf-8").splitlines()
    names = {re.split(r"[^a-z-]", line)[0] for line in listed if not line.startswith("#")}
    assert not names & set(SERVICE)
