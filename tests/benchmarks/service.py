"""A lab's day in a few minutes: many fine-tunes on a mixed cluster while nodes and controllers die. Is any job lost?

    python tests/benchmarks/service.py [--jobs N] [--quick] [--json]

A fake cluster of 2 H800 and 4 RTX 3090 (emulated GPUs, real Ray, tokens on, everything else as in production) gets N
jobs of three users: tiny models of three sizes, unlike lengths and priorities. While they run, one job is paused and
resumed, one makes room for an urgent one, the power of a node is cut, and the controller is killed with SIGKILL twice;
one job is impossible and one has bad data. Then each job that can run must have ended SUCCEEDED once, with the loss
that it has when it is trained by itself and undisturbed, and with each step in its metric log once; MLflow must show
the true status of every job; and nothing may be left running. ``problems`` lists what is not so.

``--quick``: six jobs on one GPU of each kind; a pause and one killed controller are all that happens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from service_jobs import URGENT, USERS, Catalogue, Wanted, loss_alone
from service_lab import Lab, wait_for

from lazytrain.platform.schemas import JobView

KINDS = {"h800-0": "H800", "h800-1": "H800", **{f"rtx3090-{i}": "RTX3090" for i in range(4)}}
QUICK_KINDS = {"h800-0": "H800", "rtx3090-0": "RTX3090"}
MLFLOW = {"SUCCEEDED": "FINISHED", "REJECTED": "FAILED"}
RULES = "{min_run_s: 5s, moving: false}"
"""Half an hour, the default, is longer than this day; and at five seconds jobs would move all the time."""


@dataclass
class Day:
    """What was submitted, what happened meanwhile and how long it took."""

    lab: Lab
    jobs: dict[str, Wanted] = field(default_factory=dict)
    happened: dict[str, float] = field(default_factory=dict)

    def submit(self, wanted: Wanted) -> str:
        job = self.lab.clients[wanted.user].submit(wanted.spec).id
        self.jobs[job] = wanted
        return job

    def took(self, name: str, seconds: float) -> None:
        self.happened[name] = round(seconds, 2)
        print(f"{name}: {seconds:.1f} s", file=sys.stderr)

    def view(self, job: str) -> JobView:
        return self.lab.admin.job(job)

    def training(self, job: str) -> bool:
        """Whether it trains and has a checkpoint to come back to."""
        found = self.view(job)
        if found.state in ("FAILED", "SUCCEEDED"):
            raise AssertionError(f"{found.name} is {found.state} too early: {found.sentence}")
        checkpoints = Path(found.run_dir) / "checkpoints"
        return found.state == "RUNNING" and checkpoints.is_dir() and any(checkpoints.glob("step-*/manifest.json"))

    def until(self, what: str, job: str, *states: str) -> float:
        began = time.monotonic()
        wait_for(f"{what} {self.view(job).name}", lambda: self.view(job).state in states)
        return time.monotonic() - began


def disturbed_day(day: Day, catalogue: Catalogue, count: int, steps: int) -> None:
    """Submit all jobs, and let happen what happens in a lab."""
    full = ("plan.planner=full", "plan.solve_seconds=3")
    long = [day.submit(catalogue.job(f"long-{i}", "small", steps, 60, i, f"resources.gpu=[{kind}]", *full))
            for i, kind in enumerate(["H800"] * 2 + ["RTX3090"] * 4)]  # fmt: skip
    for wanted in catalogue.mixed(count - len(long) - 1):
        day.submit(wanted)
    for job in long[:2]:
        wait_for(f"{job} trains", lambda job=job: day.training(job))
    day.took("controller_back", day.lab.kill_controller())

    urgent = day.submit(catalogue.job("urgent", "medium", 20, URGENT, 1, "resources.gpu=[H800]"))
    began = time.monotonic()
    wait_for("a job makes room", lambda: any(day.view(job).preemptions for job in long[:2]))
    day.took("preempted_after", time.monotonic() - began)
    day.took("urgent_runs_after", day.until("start of", urgent, "RUNNING", "SUCCEEDED"))

    wait_for(f"{long[2]} trains", lambda: day.training(long[2]))
    answer = day.lab.clients[USERS[2]].pause(long[2])
    assert not answer, answer
    day.took("paused_after", day.until("pause of", long[2], "PAUSED"))

    _cut_power_under(day, long[3])
    day.took("controller_back_again", day.lab.kill_controller())
    day.lab.clients[USERS[2]].resume(long[2])
    day.took("resumed_after", day.until("return of", long[2], "RUNNING", "SUCCEEDED"))


def _cut_power_under(day: Day, job: str) -> None:
    """The node of a job that trains is gone from one moment to the next; the job has to come back elsewhere."""
    wait_for(f"{job} trains", lambda: day.training(job))
    node, attempt = day.view(job).node, day.view(job).attempt
    assert node is not None
    began = time.monotonic()
    day.lab.cut_power(node)
    wait_for("the loss is noticed", lambda: day.view(job).state != "RUNNING" or day.view(job).attempt > attempt)
    day.took("loss_noticed_after", time.monotonic() - began)


def quick_day(day: Day, catalogue: Catalogue, count: int, steps: int) -> None:
    """The same in little."""
    long = day.submit(catalogue.job("long", "small", steps, 60, 0))
    for wanted in catalogue.mixed(count - 1):
        day.submit(wanted)
    wait_for("checkpoint", lambda: day.training(long))
    day.took("controller_back", day.lab.kill_controller())
    answer = day.lab.clients[USERS[0]].pause(long)
    assert not answer, answer
    day.took("paused_after", day.until("pause of", long, "PAUSED"))
    day.lab.clients[USERS[0]].resume(long)


def run(count: int, *, quick: bool, steps: int) -> dict[str, Any]:
    """One day from the first node to the last process."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lab-") as name:
        folder = Path(name)
        catalogue = Catalogue(folder / "inputs")
        lab = Lab(folder, QUICK_KINDS if quick else KINDS, USERS, RULES)
        day = Day(lab)
        try:
            day.took("ready", time.monotonic() - began)
            submitted = time.monotonic()
            (quick_day if quick else disturbed_day)(day, catalogue, count, steps)
            wait_for("the end of every job", lambda: all(_ended(job) for job in lab.admin.jobs()))
            day.took("all_jobs", time.monotonic() - submitted)
            wait_for("nothing is left", lambda: not lab.training() and not lab.actors(), 60)
            jobs = [_record(day, job, wanted) for job, wanted in day.jobs.items()]
            statuses = _mlflow_statuses(lab.settings.tracking_uri, len(jobs))
        finally:
            lab.close()
        wait_for("no process is left", lambda: not lab.left_behind(), 60)
        for job in jobs:
            job["mlflow"] = statuses.get(job["id"])
            job["loss_alone"] = loss_alone(job.pop("run_dir"), folder / "alone") if job["ends"] == "SUCCEEDED" else None
    return {
        "jobs": count,
        "nodes": len(QUICK_KINDS if quick else KINDS),
        "problems": list(_problems(jobs)),
        "same_loss": sum(job["loss"] == job["loss_alone"] for job in jobs if job["ends"] == "SUCCEEDED"),
        "true_statuses": sum(job["mlflow"] == MLFLOW[job["ends"]] for job in jobs),
        "happened_s": day.happened,
        "each": jobs,
    }


def _ended(job: JobView) -> bool:
    return job.state in ("SUCCEEDED", "FAILED", "STOPPED", "REJECTED")


def _record(day: Day, job_id: str, wanted: Wanted) -> dict[str, Any]:
    job, admin = day.view(job_id), day.lab.admin
    events = admin.events(job_id)
    return {
        "id": job.id,
        "name": job.name,
        "user": job.user,
        "ends": wanted.ends,
        "state": job.state,
        "reason": job.reason,
        "reason_expected": wanted.reason,
        "sentence": job.sentence,
        "node": job.node,
        "attempts": job.attempt,
        "preemptions": job.preemptions,
        "infra_failures": job.infra_failures,
        "wait_s": round((job.started_at or job.created_at) - job.created_at, 1),
        "loss": job.outcome.get("result", {}).get("loss"),
        "ends_seen": sum(event.kind == "state" and event.state == job.state for event in events),
        "steps_wanted": wanted.spec.train.max_steps,
        "steps": [row["step"] for row in admin.metrics(job_id) if "loss" in row],
        "run_dir": job.run_dir,
    }


def _mlflow_statuses(uri: str, count: int) -> dict[str, str]:
    """Status by job, once MLflow has heard of every end."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)

    def all_ended() -> dict[str, str]:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = client.search_runs(experiments, max_results=1000)
        found = {run.data.tags["lazytrain.job_id"]: run.info.status for run in runs}
        settled = len(found) == count and "RUNNING" not in found.values()
        return found if settled or time.monotonic() > deadline else {}

    deadline = time.monotonic() + 60
    return dict(wait_for("MLflow", all_ended, 120))


def _problems(jobs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is not as it has to be, in words; steps are replaced by their number once they are right."""
    for job in jobs:
        name = job["name"]
        if (job["state"], job["reason"]) != (job["ends"], job["reason_expected"]):
            yield f"{name} is {job['state']} ({job['reason']}): {job['sentence']}"
        if job["ends"] == "SUCCEEDED":
            if job["loss"] is None or job["loss"] != job["loss_alone"]:
                yield f"{name} has loss {job['loss']}, alone {job['loss_alone']}"
            if job["steps"] != list(range(1, job["steps_wanted"] + 1)):
                yield f"{name} logged {len(job['steps'])} steps, not each of {job['steps_wanted']} once"
            if job["ends_seen"] != 1:
                yield f"{name} ended {job['ends_seen']} times"
        if job["mlflow"] != MLFLOW[job["ends"]]:
            yield f"MLflow says {job['mlflow']} of {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=0, help="how many jobs: 30, with --quick 6")
    parser.add_argument("--steps", type=int, default=800, help="steps of the jobs that something happens to")
    parser.add_argument("--quick", action="store_true", help="two nodes, and less happens")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args()
    began = time.monotonic()
    found = run(options.jobs or (6 if options.quick else 30), quick=options.quick, steps=options.steps)
    for job in found["each"]:
        job["steps"] = len(job["steps"])
    found["seconds"] = round(time.monotonic() - began, 1)
    found["machine"] = {"node": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
    found["versions"] = {name: version(name) for name in ("ray", "torch", "mlflow")}
    print(json.dumps(found, indent=None if options.json else 1))
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
