"""Telling MLflow how jobs ended, beside the controller, which has no time to wait for it."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable

_AT_ONCE = 100


class TrackingCloser:
    """Tells MLflow of ends, one process at a time: it takes seconds to import, and as long as it likes to answer."""

    def __init__(self, run: Callable[[list[str]], object] | None = None) -> None:
        self._run = run or _in_a_process
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._go, name="tracking", daemon=True).start()

    def __call__(self, job: str) -> None:
        """The job has ended; returns at once."""
        self._ended.put(job)

    def _go(self) -> None:
        self._run([])
        while True:
            jobs = [self._ended.get()]
            while not self._ended.empty() and len(jobs) < _AT_ONCE:
                jobs.append(self._ended.get())
            self._run(jobs)


def _in_a_process(jobs: list[str]) -> None:
    command = [sys.executable, "-m", "lazytrain.platform.tracking", *jobs]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
