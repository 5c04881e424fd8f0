"""MLflow hears of runs whose process died without a word, also of those whose jobs go on later.

python -m lazytrain.platform.controller.lost_runs RUN_DIR ...
"""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from ...jobs.errors import LazytrainError
from ..logs import quiet_libraries

log = logging.getLogger(__name__)
_AT_ONCE = 100


class LostRuns:
    """Tells MLflow beside the controller, in one process at a time: that takes seconds, or as long as MLflow likes."""

    def __init__(self, run: Callable[[Sequence[str]], object] | None = None) -> None:
        self._run = run or _in_a_process
        self._lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._go, name="lost-runs", daemon=True).start()

    def __call__(self, run_dir: str) -> None:
        """The run in this directory has died; returns at once."""
        self._lost.put(run_dir)

    def _go(self) -> None:
        while True:
            found = [self._lost.get()]
            while not self._lost.empty() and len(found) < _AT_ONCE:
                found.append(self._lost.get())
            self._run(found)


def _in_a_process(run_dirs: Sequence[str]) -> None:
    command = [sys.executable, "-m", "lazytrain.platform.controller.lost_runs", *run_dirs]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=False)


def reconcile_all(run_dirs: Sequence[str]) -> None:
    """Each in turn; one that MLflow does not take does not keep the others from it."""
    from ...jobs.train import reconcile  # brings torch, which the controller has no use for

    for run_dir in run_dirs:
        try:
            reconcile(run_dir)
        except (LazytrainError, OSError) as error:
            log.warning("MLflow has not heard of the lost run in %s: %s", run_dir, error)


if __name__ == "__main__":
    quiet_libraries()
    reconcile_all(sys.argv[1:])
