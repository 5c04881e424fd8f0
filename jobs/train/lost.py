"""The truth about a run whose process is gone without a word (killed with signal 9, power cut)."""

from __future__ import annotations

from pathlib import Path

from ..run_directory import RunDirectory
from ..tracking import end_lost_run


def reconcile(run_dir: str | Path) -> bool:
    """Tell MLflow that the run has FAILED if no process is training in ``run_dir`` and its last one never said how it
    ended; whether that was so. For whoever watches over runs, when it starts and when it sees a process die.

    Raises LazytrainError when MLflow does not answer; call it again then.
    """
    directory = RunDirectory(Path(run_dir))
    if directory.in_use():
        return False
    return end_lost_run(directory.path)
