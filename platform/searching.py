"""The search of a job's batch, on its node and on the GPU that it holds, before it trains.

    python -m lazytrain.platform.searching ATTEMPT_DIRECTORY/order.json RAY_ADDRESS NODE_ID

What it finds is in RUN_DIR/batch.json, and is not searched again: what is learned depends on it.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from ..jobs.data import Rows, prepare
from ..jobs.errors import LazytrainError
from ..jobs.spec import JobSpec
from ..schedulers.best_batch import Tried
from ..schedulers.hardware import HardwareProfile
from .admission import AdmissionOrder
from .admission.measuring import Here, RowFigures
from .admission.plan_job import JobPlans
from .artifacts import AttemptFiles, JobFiles, read_json, write_json
from .cluster.local import Connection
from .cluster.run_process import Pulse, asked_to_stop, device_of, end_of
from .cluster.runs import RunOrder
from .logs import quiet_libraries
from .models import load_tokenizer
from .settings import Settings
from .trial import Order, run_probe
from .tuning import Search, SearchOrder, Trial, search_batch

MOST_PROBES = 4
MOST_S = 300.0
"""Nothing more is tried after this time: the job waits for it, and holds its GPU."""


class _Stop(LazytrainError):
    """The run was asked to stop meanwhile."""


def main(order_file: Path, address: str, node: str) -> int:
    """Search and leave the answer; the exit code is that of the command line (`jobs.errors`)."""
    quiet_libraries()
    files = AttemptFiles(order_file.parent)
    order = RunOrder.from_dict(read_json(order_file) or {})
    pulse = Pulse(files)
    outcome, code = end_of(lambda: _search(order, address, node, pulse))
    pulse.stop()
    if outcome.how != "done":
        update = {"node": order.node, "exit_code": code}
        write_json(files.outcome, outcome.model_copy(update=update).model_dump(mode="json"))
    return code


def _search(order: RunOrder, address: str, node: str, pulse: Pulse) -> dict[str, Any]:
    pulse.doing = "the first batch is tried"
    stop = asked_to_stop(order.run_dir / "stop")
    job, rows, profile = open_job(order)
    longest = rows.take(sorted(range(len(rows)), key=lambda i: -len(rows.input_ids[i]))[: job.largest()])

    def heard(trial: Trial) -> None:
        words = f"fits, {trial.report.tokens_per_s:,.0f} tokens/s" if trial.report.fits else trial.report.reason
        pulse.doing = f"batch {trial.batch} {words}"
        print(pulse.doing, flush=True)

    def meanwhile() -> None:
        if stop():
            raise _Stop("asked to stop")

    visible = {"CUDA_VISIBLE_DEVICES": order.gpu} if order.device["kind"] == "cuda" else None
    settings = Settings.read()
    connection = Connection(settings, address, visible)
    try:
        search = search_batch(
            SearchOrder(
                job_id=f"{order.claim}",
                plan_batch=partial(job.plan_at, profile),
                run=partial(
                    run_probe,
                    Order(spec=job.spec, device=device_of(order.device), rows=longest, seconds=settings.probe_s),
                ),
                low=1,
                high=job.largest(),
                most_probes=MOST_PROBES,
                most_seconds=MOST_S,
                node=node,
                directory=(order.run_dir / "tune").absolute(),
            ),
            heard,
            meanwhile,
        )
    except _Stop:
        return {"status": "stopped"}
    finally:
        connection.close()
    write_json(JobFiles(order.run_dir).batch, answer(job, profile, order.search["kind"], search))
    return {"status": "done"}


def open_job(order: RunOrder) -> tuple[JobPlans, Rows, HardwareProfile]:
    """The job with its rows, and the machine that it is planned for."""
    spec = JobSpec.model_validate(order.spec)
    cache = str(order.run_dir / "rows")
    asked = AdmissionOrder(
        job=order.job, spec=order.spec, profiles={}, cache=cache, memory_share=order.search["memory_share"]
    )
    profile = HardwareProfile.model_validate(order.search["profile"])
    data = prepare(spec.data, load_tokenizer(spec), cache=cache)
    measuring = Here(Settings.read().home.absolute() / "facts")
    return JobPlans(spec, asked, RowFigures.of(data), measuring), data.train, profile


def answer(job: JobPlans, profile: HardwareProfile, kind: str, search: Search) -> dict[str, Any]:
    """What is frozen: rows of a step, steps, the plan for them on this kind of node, and every trial."""
    best = search.best
    way = job.way(kind, profile, Tried(best.batch, 1, best.plan), best.batch)
    return {
        "batch": best.batch,
        "steps": job.steps(best.batch),
        "kind": kind,
        "way": way.model_dump(mode="json"),
        "trials": [trial.to_dict() for trial in search.trials],
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
