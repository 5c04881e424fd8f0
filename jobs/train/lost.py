"""The truth about a run whose process is gone without a word (killed with signal 9, power cut)."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from ..errors import LazytrainError
from ..run_directory import WATCHED, RunDirectory
from ..tracking import end_lost_run

log = logging.getLogger(__name__)


def reconcile(run_dir: str | Path) -> bool:
    """Make the status of a run true, in its directory and in MLflow, if no process is training in it.

    A run whose process ended without a word is ``lost`` in ``status.json`` and FAILED in MLflow; what a process could
    not tell MLflow before it ended is told now. Whether anything was to be put right. For whoever watches over runs,
    when it starts and when it sees a process die; nobody can begin to train in ``run_dir`` meanwhile.

    Raises LazytrainError when MLflow does not answer; call it again then.
    """
    directory = RunDirectory(Path(run_dir))
    with directory.unclaimed() as dead:
        if not dead:
            return False
        lost = directory.lost()
        if lost:
            directory.end("lost")
        return end_lost_run(directory.path) or lost


def reconcile_beside(run_dir: Path) -> threading.Thread:
    """`reconcile`, in the background, this machine's lost runs whose directories lie beside ``run_dir``.

    Those that a service watches over are left to it.
    Nobody waits for it and no failure reaches the caller: the next run tries again.
    """
    thread = threading.Thread(target=_reconcile_all, args=(run_dir,), name="lazytrain-reconcile", daemon=True)
    thread.start()
    return thread


def _reconcile_all(run_dir: Path) -> None:
    for path in _lost_beside(run_dir):
        try:
            if reconcile(path):
                log.warning("the run in %s had ended without a word: its status says so now", path)
        except (LazytrainError, OSError) as error:
            log.warning("the run in %s has ended without a word: %s", path, error)


def _lost_beside(run_dir: Path) -> Iterator[Path]:
    """Only those whose process was here: of another machine's, this one may not see the lock."""
    own = run_dir.absolute()
    for file in sorted(own.parent.glob(f"*/{RunDirectory(own).status_file.name}")):
        passed_over = file.parent == own or (file.parent / WATCHED).exists()
        status = None if passed_over else RunDirectory(file.parent).status()
        if status is not None and status.state == "lost" and status.host == socket.gethostname():
            yield file.parent
