"""The actor that keeps a run on its node, the one that holds its GPU, and the training process below them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..artifacts import AttemptFiles, JobFiles, read_json, write_json
from ..openmp import asleep
from .hold import Hold, start_time
from .local import NAMESPACE
from .runs import RunOrder

_KEEPER = Path(__file__).with_name("keeper.py")
_DETACHED = "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
"""Ray kills the children of a worker that ends; a grandchild has the time to clean up."""
_TRAIN, _SEARCH = "lazytrain.platform.cluster.run_process", "lazytrain.platform.searching"
_LOOK_EVERY_S = 0.2
LOST = 70
"""Exit code of a host whose hold on the GPU was taken from it."""


class RunHost:
    """Detached: it outlives whoever made it, and ends with its training process.

    The training process is a child of the keeper, in a session of its own, with its log in a file and no input. When
    this actor dies, the keeper's standard input is closed, and the keeper ends everything. The GPU is held by an actor
    below this one, so that it can be given up while the training is paused and taken again.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = RunOrder.from_dict(order)
        self._job = JobFiles(self._order.run_dir)
        self._files = self._job.attempt(self._order.attempt)
        write_json(self._files.order, order)
        self._hold: Any = None
        self._held: Any = None
        self._hold_pid, self._takes = 0, 0
        self._taking = threading.RLock()
        handle = ray.get_runtime_context().current_actor
        threading.Thread(target=self._run, args=(handle,), daemon=True).start()

    def pid(self) -> int:
        """Number of this process."""
        return os.getpid()

    def hold_pid(self) -> int:
        """Number of the process that holds the GPU; 0 while nothing holds it."""
        with self._taking:
            return self._hold_pid if self._hold is not None else 0

    def resume(self) -> None:
        """Hold the GPU again, which may have to be waited for, then let the training go on."""
        with self._taking:
            self._take()
            self._job.pause.unlink(missing_ok=True)

    def _run(self, handle: Any) -> None:
        try:
            self._take()
            if self._batch_is_found():
                self._keep(self._files.exit, _TRAIN, str(self._files.order))
        except BaseException:  # nobody else would end this actor: whoever looks finds the run lost
            traceback.print_exc()
            os._exit(LOST)
        self._let_go()  # an actor that still waits for another's answer does not leave
        handle.__ray_terminate__.remote()

    def _batch_is_found(self) -> bool:
        """Search the batch if that is asked for and not done; False when the search has ended the run."""
        if not self._order.search:
            return True
        if not self._job.batch.exists():
            context = ray.get_runtime_context()
            asked = [str(self._files.order), str(context.gcs_address), context.get_node_id()]
            self._keep(self._files.searched, _SEARCH, *asked)
        found = read_json(self._job.batch)
        if found is None:
            self._files.searched.replace(self._files.exit)
            return False
        train = {**self._order.spec["train"], "batch": found["batch"]}
        way = found["way"]
        changes = {"spec": {**self._order.spec, "train": train}, "policy": way["policy"], "device": way["device"]}
        self._order = replace(self._order, **changes)
        write_json(self._files.order, self._order.to_dict())
        return True

    def _take(self) -> None:
        with self._taking:
            if self._hold is None:
                here = ray.get_runtime_context().get_node_id()
                self._takes += 1
                hold = ray.remote(Hold).options(
                    name=f"hold-{self._order.claim}-{self._takes}",
                    namespace=NAMESPACE,
                    lifetime="detached",
                    num_gpus=1,
                    num_cpus=self._order.cpus,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
                )
                actor = hold.remote(os.getpid(), start_time(os.getpid()))
                self._hold_pid = int(ray.get(actor.there.remote()))
                self._hold, self._held = actor, actor.hold.remote()

    def _give_up(self) -> None:
        with self._taking:
            if self._job.pause.exists():
                self._let_go()

    def _let_go(self) -> None:
        with self._taking:
            if self._hold is not None:
                ray.kill(self._hold)
                self._hold = None

    def _was_taken(self) -> bool:
        with self._taking:
            return self._hold is not None and bool(ray.wait([self._held], timeout=0)[0])

    def _keep(self, exit_file: Path, module: str, *arguments: str) -> None:
        """Run a module below the keeper to its end, and hold the GPU as long as it is not paused."""
        alive = self._start_keeper(exit_file, [sys.executable, "-m", module, *arguments])
        while not select.select([alive], [], [], _LOOK_EVERY_S)[0]:
            if self._job.pause.exists() and _is_paused(self._files):
                self._give_up()
            elif self._was_taken():
                os._exit(LOST)  # somebody else may get the GPU: the keeper ends everything
        os.close(alive)

    def _start_keeper(self, exit_file: Path, training: list[str]) -> int:
        """A descriptor that is at its end once the keeper has ended."""
        keeper = [sys.executable, "-I", "-S", str(_KEEPER), str(exit_file), str(self._order.host_bytes)]
        alive, held = os.pipe()
        with self._files.log.open("ab") as log:
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
        return {**os.environ, "OMP_NUM_THREADS": threads, **asleep(), "PYTHONUNBUFFERED": "1", **self._visible()}

    def _visible(self) -> dict[str, str]:
        """The GPU that placement chose, whatever number Ray has given to the hold."""
        if self._order.device["kind"] != "cuda":
            return {"CUDA_VISIBLE_DEVICES": ""}
        return {"CUDA_VISIBLE_DEVICES": self._order.gpu, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _is_paused(files: AttemptFiles) -> bool:
    beat = read_json(files.beat)
    return bool(beat and beat.get("paused"))
