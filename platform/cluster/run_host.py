"""The actor that holds a run's GPU on its node, and the training process below it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ray

from ..artifacts import AttemptFiles, JobFiles, write_json
from .runs import RunOrder

_KEEPER = Path(__file__).with_name("keeper.py")
_DETACHED = "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
"""Ray kills the children of a worker that ends; a grandchild has the time to clean up."""
_TRAIN = "lazytrain.platform.cluster.run_process"


class RunHost:
    """Detached: it outlives whoever made it, and ends with its training process.

    The training process is a child of the keeper, in a session of its own, with its log in a file and no input. When
    this actor dies, the keeper's standard input is closed, and the keeper ends everything.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = RunOrder.from_dict(order)
        files = JobFiles(self._order.run_dir).attempt(self._order.attempt)
        write_json(files.order, order)
        self._alive = self._start_keeper(files)
        handle = ray.get_runtime_context().current_actor
        threading.Thread(target=self._leave_with_it, args=(handle,), daemon=True).start()

    def pid(self) -> int:
        """Number of this process."""
        return os.getpid()

    def _start_keeper(self, files: AttemptFiles) -> int:
        """A descriptor that is at its end once the keeper has ended."""
        keeper = [sys.executable, "-I", "-S", str(_KEEPER), str(files.exit), str(self._order.host_bytes)]
        training = [sys.executable, "-m", _TRAIN, str(files.order)]
        alive, held = os.pipe()
        with files.log.open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DETACHED, *keeper, *training],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[held],
                env=self._environment(),
            )
        os.close(held)
        self._keeper.wait()
        return alive

    def _environment(self) -> dict[str, str]:
        threads = str(max(1, int(self._order.cpus)))
        return {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}

    def _leave_with_it(self, handle: Any) -> None:
        os.read(self._alive, 1)
        handle.__ray_terminate__.remote()
