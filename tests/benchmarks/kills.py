"""Does the service lose a job or start one twice when its parts are killed? Real processes, real training, kill -9.

    python tests/benchmarks/kills.py [--quick] [--json]

Starts ``lazytrain up`` on emulated GPUs, trains a few tiny jobs, and while they run kills, one after the other, the
controller, the API, the supervisor, a training process and the whole Ray. Each job must end SUCCEEDED once, with the
loss that it has when nothing is killed, and with every step in its metric log once. ``--quick``: two jobs instead of
six, and no undisturbed run to compare with.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lazytrain.jobs.errors import Unreachable
from lazytrain.jobs.spec import JobSpec, load_spec
from lazytrain.platform.client import Client
from lazytrain.platform.demo import inputs
from lazytrain.platform.supervisor import Place

PATIENCE_S = 400.0
RULES = ("train.batch=4", "plan.planner=every_layer", "plan.nvme=null", "evaluate.limit=2", "output.save_every=5")
PARTS = ("controller", "api", "supervisor", "training", "ray")


def command(*arguments: str, environment: dict[str, str]) -> dict[str, Any]:
    """The JSON answer of a command line."""
    line = [sys.executable, "-c", "from lazytrain.platform.cli import main; main()", *arguments, "--json"]
    answer = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


@contextlib.contextmanager
def service(folder: Path) -> Iterator[tuple[Client, Place, dict[str, str]]]:
    """A service of its own, stopped at the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"HOME": folder / "home", "RAY_AUTH": "disabled", "API_PORT": port, "ROOTS": folder}
    environment = {**os.environ, **{f"LAZYTRAIN_{name}": str(value) for name, value in settings.items()}}
    up = ("up", "--emulate", "RTX3090", "--gpus", "2", "--cpus", "2", "--no-mlflow")
    try:
        where = command(*up, environment=environment)
        client = Client(where["api"], Path(where["token_file"]).read_text(encoding="utf-8"))
        yield client, Place(folder / "home"), environment
    finally:
        command("down", environment=environment)


def specs(folder: Path, count: int) -> list[JobSpec]:
    """Tiny jobs that differ in their seed."""
    inputs._TRAIN_ROWS, inputs._EVAL_ROWS = 240, 8
    job = inputs.write_inputs(folder / "job", seed=0)
    return [load_spec(job, (*RULES, f"train.seed={seed}", "train.max_steps=40")) for seed in range(count)]


def run(count: int, parts: tuple[str, ...]) -> dict[str, Any]:
    """Train ``count`` jobs while ``parts`` are killed; what became of them."""
    with tempfile.TemporaryDirectory() as name, service(Path(name)) as (client, place, environment):
        started = time.monotonic()
        ids = [client.submit(spec).id for spec in specs(Path(name), count)]
        kills = [kill(part, client, place, environment) for part in parts]
        ended = [client.wait(job, timeout_s=PATIENCE_S) for job in ids]
        return {
            "seconds": time.monotonic() - started,
            "kills": kills,
            "states": [job.state for job in ended],
            "sentences": [job.sentence for job in ended if job.state != "SUCCEEDED"],
            "attempts": [job.attempt for job in ended],
            "losses": [job.outcome.get("result", {}).get("loss") for job in ended],
            "steps_once": all(steps_of(client, job) == list(range(1, 41)) for job in ids),
        }


def steps_of(client: Client, job: str) -> list[int]:
    """Steps of the metric log that report a loss."""
    return [row["step"] for row in client.metrics(job) if "loss" in row]


def kill(part: str, client: Client, place: Place, environment: dict[str, str]) -> dict[str, Any]:
    """Kill one part while something trains; seconds until the service works again."""
    wait_for(lambda: any(job.progress and job.progress.step for job in client.jobs(states=["RUNNING"])))
    pid = training_pid(client) if part == "training" else _pid(place, part)
    leader = client.health().leader
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    if part == "supervisor":
        command("up", "--emulate", "RTX3090", "--gpus", "2", "--cpus", "2", "--no-mlflow", environment=environment)
    if part != "training":
        wait_for(lambda: place.process(part) is not None and _pid(place, part) != pid)
    if part in ("controller", "ray"):  # with its Ray the controller goes too
        wait_for(lambda: client.health().leader not in (None, leader))
    wait_for(lambda: client.health().status == "ok")
    return {"part": part, "back_after_s": time.monotonic() - started}


def training_pid(client: Client) -> int:
    """The process that trains one of the running jobs: the only one that has its order in its command line."""
    folders = [job.run_dir for job in client.jobs(states=["RUNNING"])]
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_text().split("\0") if entry.name.isdecimal() else []
            if any("run_process" in word for word in line[:3]) and any(folder in line[-2] for folder in folders):
                return int(entry.name)
    raise AssertionError("nothing trains")


def _pid(place: Place, part: str) -> int:
    process = place.process(part)
    assert process is not None, part
    return process.pid


def wait_for(what: Callable[[], object]) -> None:
    """Until it is so, also over an API that is away for a while."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(Unreachable):
            if what():
                return
        time.sleep(0.2)
    raise AssertionError("it did not happen")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two jobs, and no undisturbed run")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args()
    count = 2 if options.quick else 6
    found: dict[str, Any] = {"disturbed": run(count, PARTS)}
    if not options.quick:
        found["undisturbed"] = run(count, ())
        found["same_losses"] = found["disturbed"]["losses"] == found["undisturbed"]["losses"]
    disturbed = found["disturbed"]
    found["lost"] = sum(state != "SUCCEEDED" for state in disturbed["states"])
    found["machine"] = {"node": platform.platform(), "python": platform.python_version()}
    print(json.dumps(found, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
