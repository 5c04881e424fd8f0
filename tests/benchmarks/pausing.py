"""How long until a paused job has given its GPU up, and until it goes on?

    python tests/benchmarks/pausing.py [--quick] [--json]

The service as in production on a fake cluster of one node with one emulated GPU (see `service_lab`). A small job
trains, and is paused and resumed through the API. ``freed_s`` is from the end of the last step before the pause until
Ray would give the GPU to somebody else; ``pause_s`` is the same from the request on. ``resume_s`` is from the request
to resume until the first step after it is done. Medians, the worst of all, and every single time; ``--quick`` pauses
twice.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from service_jobs import USERS, Catalogue
from service_lab import Lab, wait_for

from lazytrain.jobs.tracking.metric_log import read_from
from lazytrain.platform.artifacts import JobFiles
from lazytrain.platform.cluster.local import Connection

STEPS = 1_000_000
BETWEEN_S = 1.0
"""How long it trains, and how long it is paused, each time."""


class Job:
    """A job that trains until it is stopped."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        wanted = Catalogue(folder / "inputs").job("long", "small", STEPS, 50, 0, "train.epochs=1000000")
        self._client = lab.clients[USERS[0]]
        self.id = self._client.submit(wanted.spec).id
        self._files = JobFiles(self._client.job(self.id).run_dir)
        wait_for("its first step", lambda: self._step_times()[1:])

    def _step_times(self) -> list[float]:
        rows = [row for row, _ in read_from(self._files.metrics, 0)] if self._files.metrics.exists() else []
        return [row["time"] for row in rows if "tokens_per_s" in row]

    def pause(self) -> tuple[float, float]:
        """Seconds until the GPU is free, from the last step's end and from the request."""
        asked = time.time()
        refused = self._client.pause(self.id)
        assert not refused, refused
        wait_for("a free GPU", lambda: ray.available_resources().get("GPU", 0) == 1)
        free = time.time()
        wait_for("PAUSED", lambda: self._client.job(self.id).state == "PAUSED")
        return free - self._step_times()[-1], free - asked

    def resume(self) -> float:
        """Seconds until the first step is done."""
        before, asked = len(self._step_times()), time.time()
        refused = self._client.resume(self.id)
        assert not refused, refused
        wait_for("a step", lambda: len(self._step_times()) > before)
        return self._step_times()[before] - asked

    def end(self) -> None:
        """Stop it."""
        self._client.stop(self.id)
        wait_for("STOPPED", lambda: self._client.job(self.id).state == "STOPPED")


def run(times: int) -> dict[str, Any]:
    """Pause and resume so many times."""
    freed, paused, resumed = [], [], []
    with tempfile.TemporaryDirectory(prefix="lab-") as name:
        folder = Path(name)
        lab = Lab(folder, {"h800-0": "H800"}, USERS[:1], "{}")
        try:
            connection = Connection(lab.settings, lab.address)
            job = Job(lab, folder)
            for _ in range(times):
                time.sleep(BETWEEN_S)
                from_step, from_request = job.pause()
                time.sleep(BETWEEN_S)
                freed.append(from_step)
                paused.append(from_request)
                resumed.append(job.resume())
                print(f"freed {freed[-1]:.2f} s, resumed {resumed[-1]:.2f} s", file=sys.stderr)
            job.end()
            connection.close()
        finally:
            lab.close()
    return {
        **_figures("freed_s", freed),
        **_figures("pause_s", paused),
        **_figures("resume_s", resumed),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load": os.getloadavg(),
        "versions": {"python": platform.python_version(), "ray": version("ray"), "torch": version("torch")},
    }


def _figures(name: str, seconds: list[float]) -> dict[str, Any]:
    rounded = [round(second, 3) for second in seconds]
    return {name: statistics.median(rounded), f"{name}_worst": max(rounded), f"{name}_all": rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two times instead of five")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = run(2 if options.quick else 5)
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    for name in ("freed_s", "pause_s", "resume_s"):
        print(f"{name}: median {result[name]:.2f}, worst {result[name + '_worst']:.2f}")


if __name__ == "__main__":
    main()
