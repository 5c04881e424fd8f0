"""Many tiny jobs submitted at once: how fast they are taken in, and how long a step of the controller takes.

The store (SQLite), the controller and placement are real; training is stood in for: a run ends after it has been looked
at three times. So everything that is measured is the service's own work.

    python tests/benchmarks/controller.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazytrain.jobs.errors import LazytrainError
from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.admission import Admission, AdmissionOrder, Way
from lazytrain.platform.artifacts import JobFiles, write_json
from lazytrain.platform.cluster.runs import Look, Machine, NodeReport, Outcome, Phase, RunOrder
from lazytrain.platform.controller import Config, Controller
from lazytrain.platform.store import NewJob, Role, Store
from lazytrain.schedulers.hardware import MEASUREMENT, hardware
from lazytrain.schedulers.placement import decide

LOOKS = 3
LAYERS = 28
POLICY = {
    "boundaries": [{"index": index, "home": "host"} for index in range(LAYERS)],
    "layers": [
        {"index": index, "internals": "matmuls", "internals_home": "host", "resident": False} for index in range(LAYERS)
    ],
}
"""As large as that of a 7B model: every job's plan has one for each kind of node."""


@dataclass
class StandIn:
    """Machines whose runs end well after a few looks, and planning that is done at once."""

    nodes: int
    gpus: int
    looks: dict[str, int] = field(default_factory=dict)
    found: dict[str, Admission | LazytrainError] = field(default_factory=dict)

    def machines(self) -> list[Machine]:
        return [
            Machine(name=f"n{i}", address="", kind="H800", device="cuda", cpus=64, gpus=self.gpus)
            for i in range(self.nodes)
        ]

    def inspect(self, machine: str, token_file: Path) -> NodeReport:
        return NodeReport(versions={})

    def measure(self, machine: str) -> Mapping[str, Any]:
        return hardware("H800").model_copy(update={"measurement": MEASUREMENT}).model_dump(mode="json")

    def start(self, order: RunOrder) -> None:
        self.looks[order.claim] = 0

    def runs(self) -> set[str]:
        return {claim for claim, looks in self.looks.items() if looks < LOOKS}

    def look(self, claim: str, run_dir: Path, attempt: int) -> Look:
        if claim not in self.looks:
            return Look(Phase.ABSENT)
        self.looks[claim] += 1
        if self.looks[claim] < LOOKS:
            return Look(Phase.RUNNING, self.looks[claim], self.looks[claim], 3, 0.1)
        files, record = JobFiles(run_dir), {"status": "done", "steps": 3, "loss": 0.5}
        write_json(files.result, record, durable=False)
        files.model.mkdir(exist_ok=True)
        (files.model / "model.safetensors").touch()
        return Look(Phase.ENDED, outcome=Outcome(how="done", step=3, result=record))

    def stop(self, claim: str, run_dir: Path) -> None:
        self.looks[claim] = LOOKS

    def pause(self, claim: str, run_dir: Path) -> None:
        """Nobody pauses."""

    def resume(self, claim: str, run_dir: Path) -> None:
        """Nobody pauses."""

    def kill(self, claim: str) -> None:
        self.looks[claim] = LOOKS

    def submit(self, order: AdmissionOrder) -> None:
        option = {"tokens_per_s": 1e4, "work_tokens": 1e4, "host_bytes": 1 << 30}
        ways = {kind: Way(option={"kind": kind, **option}, policy=POLICY, device={}) for kind in order.profiles}
        self.found[order.job] = Admission(batch=8, steps=3, ways=ways, limits={})

    def results(self) -> dict[str, Admission | LazytrainError]:
        found, self.found = self.found, {}
        return found

    def close(self) -> None:
        """Nothing to close."""


def run(jobs: int, nodes: int, gpus: int) -> dict[str, Any]:
    """Submit, then step until all have ended."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{folder}/store.db")
        store.people.add("ada", Role.SUBMITTER, time.time())
        stand_in = StandIn(nodes, gpus)
        controller = Controller("bench", store, stand_in, stand_in, decide, Config(), time.time)
        started = time.perf_counter()
        for number in range(jobs):
            store.jobs.create(_job(number, folder), time.time())
        submitted = time.perf_counter() - started
        steps = _steps(controller, store)
        seconds = time.perf_counter() - started
        done = store.jobs.count()[JobState.SUCCEEDED]
        store.close()
    return {
        "jobs": jobs,
        "gpus": nodes * gpus,
        "succeeded": done,
        "submits_per_s": jobs / submitted,
        "jobs_per_s": jobs / seconds,
        "steps": len(steps),
        "step_median_s": statistics.median(steps),
        "step_p95_s": statistics.quantiles(steps, n=20)[-1],
        "step_worst_s": max(steps),
    }


def _job(number: int, folder: str) -> NewJob:
    job_id = f"j-{number:010x}"
    spec = {"name": "tiny", "train": {}, "output": {"dir": folder}, "queue": {"retries": 0}}
    run_dir = f"{folder}/{job_id}"
    return NewJob(id=job_id, user="ada", name="tiny", spec=spec, run_dir=run_dir, priority=number % 100)


def _steps(controller: Controller, store: Store) -> list[float]:
    """Seconds of each step until nothing is left to do."""
    times = []
    while set(store.jobs.count()) != {JobState.SUCCEEDED}:
        before = time.perf_counter()
        controller.step()
        times.append(time.perf_counter() - before)
    return times


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="60 jobs instead of 500")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args()
    found = run(60 if options.quick else 500, nodes=8, gpus=8)
    found["load"] = os.getloadavg()
    found["machine"] = {"node": platform.platform(), "python": platform.python_version()}
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:16} {value}")


if __name__ == "__main__":
    main()
