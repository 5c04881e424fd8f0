"""Each role runs with no other packages than those that its image has (``deploy/images/*.txt``)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.artifacts import JobFiles, read_json, write_json
from lazytrain.platform.cluster.runs import RunOrder
from lazytrain.platform.models import facts_of, find_model

ROOT = Path(__file__).parents[2]


def run(role: dict[str, str], script: str, *arguments: str) -> str:
    """What a script prints in a process that has only what the role's image has."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False, env=role
    )
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
import importlib, sys
for name in sys.argv[1:]: importlib.import_module(name)
from lazytrain.platform.api import create_app
from lazytrain.platform.settings import Settings
print(len(create_app(None, Settings(), None).openapi()["paths"]))
"""


def test_the_server_starts(only: Callable[..., dict[str, str]]) -> None:
    """That it also plans and trains over a cluster is shown by ``tests/docs/test_commands.py``."""
    wanted = modules("platform/api", "platform/controller", "platform/store", "platform/admission", "dashboards")
    wanted += modules("platform/client", "platform/supervisor", "platform/cluster/elsewhere", "platform/cli/app")
    assert len(wanted) > 60
    assert int(run(only("server"), SERVER, *wanted)) > 10


WORKER = """
import importlib, sys
from pathlib import Path
for name in ("cluster.run_host", "cluster.profiling", "cluster.survey", "probe"):
    importlib.import_module(f"lazytrain.platform.{name}")
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.admission.measuring import Here
from lazytrain.platform.cluster.run_process import main
spec, here = load_spec(sys.argv[2]), Here(Path(sys.argv[1]).parent / "facts")
print(here.facts(spec, batch=2, length=here.rows(spec, sys.argv[1] + ".rows").longest, dtype="float32").micro_batch)
main(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_worker_measures_and_trains(tiny_job: Path, tmp_path: Path, only: Callable[..., dict[str, str]]) -> None:
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
    assert (
        run(only("worker", "fastapi", "starlette", "uvicorn"), WORKER, str(files.order), str(tiny_job)).split()[0]
        == "2"
    )
    outcome = read_json(files.outcome)
    assert outcome is not None and (outcome["how"], outcome["step"]) == ("done", 2), outcome


IMPORTED = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    print(name)
"""
LEFT_OUT = {
    "server": ("torch", "transformers", "datasets", "bitsandbytes", "peft", "accelerate", "safetensors", "pyarrow"),
    "worker": ("sqlalchemy", "alembic", "psycopg", "ortools", "flask", "sklearn"),
}


@pytest.mark.parametrize("role", sorted(LEFT_OUT))
def test_a_role_is_without_what_it_has_no_use_for(only: Callable[..., dict[str, str]], role: str) -> None:
    """All of these are installed here, so that this also shows that something hides them."""
    assert run(only(role), IMPORTED, "ray", *LEFT_OUT[role]).split() == ["ray"]
