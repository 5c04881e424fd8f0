"""The MLflow run of a job that has ended shows how it ended, also if its process could not say so or never began.

python -m lazytrain.platform.tracking [JOB ...]

Without a job: every job that ended lately, for a controller that has just come.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..jobs.errors import LazytrainError
from ..jobs.lifecycle import JobState
from ..jobs.tracking import sync_run
from ..jobs.tracking.record import JOB_ID, RECORD_FILE, RunRecord
from .artifacts import JobFiles
from .logs import quiet_libraries
from .settings import Settings
from .store import Job, Store

log = logging.getLogger(__name__)

EXPERIMENT = "lazytrain"
"""MLflow experiment of the service."""
_STATUS = {
    JobState.SUCCEEDED: "FINISHED",
    JobState.FAILED: "FAILED",
    JobState.STOPPED: "KILLED",
    JobState.REJECTED: "FAILED",
}
_LATELY = 200
"""Jobs that a new controller looks at again: the last one may have been killed before it told MLflow."""


def close_all(jobs: Sequence[Job], uri: str, experiment: str) -> None:
    """Tell MLflow of each; one of which it does not want to hear does not keep it from the others."""
    for job in jobs:
        try:
            close_tracking(job, uri, experiment)
        except (LazytrainError, OSError) as error:
            log.warning("MLflow has not heard of the end of job %s: %s", job.id, error)


def close_tracking(job: Job, uri: str, experiment: str) -> None:
    """Forward what a run left behind and set the status; a job that never trained gets a run that says why."""
    with _own_folder(job) as folder:
        path = folder / RECORD_FILE
        record = RunRecord.load(path) if path.exists() else _new_record(path, job, uri, experiment)
        if record.ended and record.status is None:
            return  # the run said so itself, and MLflow has heard it
        record.end(_STATUS[job.state])
        sync_run(folder)


@contextlib.contextmanager
def _own_folder(job: Job) -> Iterator[Path]:
    """The job's folder; one that is thrown away for a job that got none."""
    files = JobFiles(job.run_dir)
    if files.belongs_to(job.id):
        yield files.path
        return
    with tempfile.TemporaryDirectory(prefix="lt-") as folder:
        yield Path(folder)


def _new_record(path: Path, job: Job, uri: str, experiment: str) -> RunRecord:
    tags = {JOB_ID: job.id, "user": job.user, "reason": job.reason, "sentence": job.sentence}
    return RunRecord.open(path, uri=uri, experiment=experiment, run_name=job.name, params=job.spec, tags=tags)


def main(arguments: list[str]) -> None:
    """Tell MLflow of the jobs that are named, or of those that ended lately."""
    quiet_libraries()
    settings = Settings.read()
    store = Store(settings.database_url)
    try:
        found = store.jobs.list(ids=arguments or None, states=_STATUS, limit=None if arguments else _LATELY)
        close_all(found, settings.tracking_uri, EXPERIMENT)
    finally:
        store.close()


if __name__ == "__main__":
    main(sys.argv[1:])
