"""What do fifty open pages cost the controller? The length of its steps with and without them, in turns.

    python tests/benchmarks/pages.py [--quick] [--json]

The controller and the store (SQLite) are real and run here; API and pages are served by a process of their own, as
``lazytrain up`` does it, and a third process asks as fifty browser windows do: every part of a page that is live, every
three seconds, with the tag of what it knows already. Training is stood in for by 64 runs that go on, beside 200 jobs
that wait. ``ratio`` is the median step with pages over the one without; ``sent`` counts answers, ``same`` those that
said that nothing has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from controller import StandIn, _job

from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.artifacts import JobFiles, write_json
from lazytrain.platform.cluster.runs import Look, Phase
from lazytrain.platform.controller import Config, Controller
from lazytrain.platform.settings import Settings
from lazytrain.platform.store import Role, Store
from lazytrain.schedulers.placement import decide

NODES, GPUS, JOBS, PAGES = 8, 8, 264, 50
STEP_EVERY_S = 0.5


@dataclass
class Endless(StandIn):
    """Machines whose runs go on: each look finds another beat."""

    def look(self, claim: str, run_dir: Path, attempt: int) -> Look:
        """It runs."""
        if claim not in self.looks:
            return Look(Phase.ABSENT)
        self.looks[claim] += 1
        return Look(Phase.RUNNING, self.looks[claim], self.looks[claim], 10_000, 0.5)


def run(rounds: int, seconds: float) -> dict[str, Any]:
    """``rounds`` times: steps for ``seconds`` without pages, then with them."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{folder}/store.db")
        token = _fill(store, folder)
        machines = Endless(NODES, GPUS)
        controller = Controller("bench", store, machines, machines, decide, Config(), time.time)
        while store.jobs.count().get(JobState.RUNNING, 0) < NODES * GPUS:
            controller.step()
        _reports(store)
        jobs = [job.id for job in store.jobs.list(states=[JobState.RUNNING])]
        without: list[float] = []
        beside: list[float] = []
        asked: list[dict[str, Any]] = []
        with _served(folder) as url:
            for _ in range(rounds):
                without += _steps(controller, seconds)
                with _windows(url, token, jobs, seconds + 2) as windows:
                    time.sleep(2)  # signed in and opened
                    beside += _steps(controller, seconds)
                asked.append(windows)
        store.close()
    return _report(without, beside, asked)


def _report(without: list[float], beside: list[float], asked: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "pages": PAGES,
        "running": NODES * GPUS,
        "waiting": JOBS - NODES * GPUS,
        "ratio": statistics.median(beside) / statistics.median(without),
        "step_without_s": statistics.median(without),
        "step_with_s": statistics.median(beside),
        "worst_without_s": max(without),
        "worst_with_s": max(beside),
        "steps": len(without) + len(beside),
        "sent": sum(found["sent"] for found in asked),
        "same": sum(found["same"] for found in asked),
        "failed": sum(found["failed"] for found in asked),
        "answer_median_s": statistics.median(found["median_s"] for found in asked),
    }


def _fill(store: Store, folder: str) -> str:
    for name, role in (("ada", Role.SUBMITTER), ("root", Role.ADMIN)):
        store.people.add(name, role, time.time())
    for number in range(JOBS):
        store.jobs.create(_job(number, folder), time.time())
    return store.people.new_token("root", time.time())


def _reports(store: Store) -> None:
    """What the training processes would have written: some hundred steps each."""
    for job in store.jobs.list(states=[JobState.RUNNING]):
        files = JobFiles(job.run_dir)
        files.claim(job.id)
        beat = {"beat": 1, "step": 500, "total_steps": 10_000, "step_s": 0.5}
        write_json(files.attempt(job.attempt).beat, beat, durable=False)
        rows = ({"step": k, "time": 0.0, "loss": 1 / k, "tokens_per_s": 8e3, "step_s": 0.5} for k in range(1, 501))
        files.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _steps(controller: Controller, seconds: float) -> list[float]:
    """Seconds of each step, one every half second."""
    found, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        begun = time.perf_counter()
        controller.step()
        found.append(time.perf_counter() - begun)
        time.sleep(max(0.0, STEP_EVERY_S - found[-1]))
    return found


# ---- the process that serves


@contextlib.contextmanager
def _served(folder: str) -> Iterator[str]:
    command = [sys.executable, __file__, "--serve", folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(20)


def serve(folder: str) -> None:
    """API and pages on any free port, whose address is printed."""
    import socket

    import uvicorn

    from lazytrain.dashboards.service import with_pages
    from lazytrain.platform.api import create_app

    store = Store(f"sqlite:///{folder}/store.db")
    settings = Settings(home=Path(folder) / "home", requests_per_minute=100_000)
    app = with_pages(create_app(store, settings, StandIn(0, 0)), settings)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


# ---- the process that asks


@contextlib.contextmanager
def _windows(url: str, token: str, jobs: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Fifty windows while the block runs; what they counted is in the mapping afterwards."""
    command = [sys.executable, __file__, "--ask", json.dumps([url, token, jobs, seconds])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = {}
    yield found
    answer, _ = process.communicate(timeout=seconds + 60)
    found.update(json.loads(answer))


@dataclass
class Window:
    """One browser window: a page and its live parts."""

    url: str
    cookie: str
    parts: list[tuple[str, float]]
    """Path and seconds between two looks."""
    tags: dict[str, str] = field(default_factory=dict)
    answers: list[tuple[int, float]] = field(default_factory=list)

    def look(self, until: float, offset_s: float) -> None:
        """Ask as htmx does, until the time is over."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        due = {path: time.monotonic() + offset_s for path, _ in self.parts}
        every = dict(self.parts)
        while (at := min(due.values())) < until:
            time.sleep(max(0.0, at - time.monotonic()))
            path = min(due, key=lambda path: due[path])
            self._ask(connection, path)
            due[path] = time.monotonic() + every[path]
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection, path: str) -> None:
        headers = {"Cookie": self.cookie, "HX-Request": "true"}
        if path in self.tags:
            headers["If-None-Match"] = self.tags[path]
        begun = time.perf_counter()
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        self.answers.append((answer.status, time.perf_counter() - begun))
        self.tags[path] = answer.headers.get("etag", "")


def ask(url: str, token: str, jobs: list[str], seconds: float) -> dict[str, Any]:
    """Open the windows, each with a session of its own, and count."""
    windows = [Window(url, _signed_in(url, token), _parts(number, jobs)) for number in range(PAGES)]
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=w.look, args=(until, 3.0 * k / PAGES)) for k, w in enumerate(windows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [answer for window in windows for answer in window.answers]
    return {
        "sent": len(answers),
        "same": sum(status == 304 for status, _ in answers),
        "failed": sum(status not in (200, 304) for status, _ in answers),
        "median_s": statistics.median(seconds for _, seconds in answers),
    }


def _parts(number: int, jobs: list[str]) -> list[tuple[str, float]]:
    """A fifth of the windows shows the overview, three tenths the queue, two fifths a job, a tenth the nodes."""
    if number % 10 < 2:
        return [("/?part=all", 3.0)]
    if number % 10 < 5:
        return [(f"/queue?page={1 + number % 5}&part=rows", 3.0)]
    if number % 10 < 9:
        job = jobs[number % len(jobs)]
        return [(f"/jobs/{job}?part=head", 3.0), (f"/jobs/{job}?part=training", 3.0)]
    return [("/nodes?part=all", 4.0)]


def _signed_in(url: str, token: str) -> str:
    place = urlsplit(url).netloc
    connection = http.client.HTTPConnection(place, timeout=30)
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Origin": url}
    connection.request("POST", "/login", urlencode({"token": token}), headers)
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 303, answer.status
    return str(answer.headers["set-cookie"]).split(";", 1)[0]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of ten seconds instead of three of twenty")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--ask", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if options.ask:
        print(json.dumps(ask(*options.ask)))
        return
    found: Mapping[str, Any] = run(1, 10.0) if options.quick else run(3, 20.0)
    found = {**found, "machine": {"node": platform.platform(), "python": platform.python_version()}}
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:16} {value}")


if __name__ == "__main__":
    main()
