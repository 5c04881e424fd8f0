"""The MLflow run of a job that has ended ends too, even if the training process could not tell MLflow itself.

python -m lazytrain.platform.controller.close_tracking RUN_DIR FINISHED|FAILED|KILLED
"""

from __future__ import annotations

import sys
from pathlib import Path

from ...jobs.tracking import sync_run
from ...jobs.tracking.record import RECORD_FILE, RunRecord
from ..logs import quiet_libraries


def close_tracking(run_dir: Path, status: str) -> None:
    """Forward what was left behind and set the status; nothing for a directory without an MLflow run."""
    path = run_dir / RECORD_FILE
    if not path.exists():
        return
    record = RunRecord.load(path)
    record.status = status
    record.save()
    sync_run(run_dir)


if __name__ == "__main__":
    quiet_libraries()
    close_tracking(Path(sys.argv[1]), sys.argv[2])
