"""The training process of a run: does what its order says, gives signs of life, and says how it ended.

python -m lazytrain.platform.cluster.run_process ATTEMPT_DIRECTORY/order.json
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...jobs.errors import (
    CheckpointError,
    DeviceBusy,
    DoesNotFit,
    InputError,
    LazytrainError,
    NonFiniteGradient,
    OutOfMemory,
    ProgramError,
)
from ...jobs.units import format_bytes
from ..artifacts import AttemptFiles, JobFiles, read_json, write_json
from ..logs import quiet_libraries
from .runs import Outcome, RunOrder

_BEAT_EVERY_S = 1.0
_FINAL = (InputError, DoesNotFit, ProgramError, NonFiniteGradient, CheckpointError)
"""Errors that would be the same the next time."""


class Pulse:
    """Writes ``beat.json`` every second from a thread of its own, with how far the training is."""

    def __init__(self, files: AttemptFiles, nvme_bytes: float = 0.0) -> None:
        self._files = files
        self._nvme_bytes = nvme_bytes
        self._count, self._writing = 0, threading.Lock()
        self._done = threading.Event()
        self.step, self.total_steps, self.step_s = 0, 0, 0.0
        self.loss: float | None = None
        self.paused, self.doing = False, ""
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def hear(self, record: Mapping[str, float]) -> None:
        """A report of the training loop."""
        self.step, self.total_steps = int(record["step"]), int(record["total_steps"])
        self.step_s = record.get("step_s", self.step_s)
        loss = record.get("loss")
        self.loss = loss if loss is not None and math.isfinite(loss) else self.loss

    def told(self, paused: bool) -> None:
        """The GPU's memory was given back, or is taken again: said at once."""
        self.paused = paused
        self._write()

    def stop(self) -> None:
        """One last beat, which shows the last step."""
        self._done.set()
        self._thread.join()
        self._write()

    def _run(self) -> None:
        self._write()
        while not self._done.wait(_BEAT_EVERY_S):
            self._write()

    def _write(self) -> None:
        with self._writing:
            self._count += 1
            now = {"beat": self._count, "step": self.step, "total_steps": self.total_steps, "step_s": self.step_s}
            more = {"paused": self.paused, "doing": self.doing, "nvme_bytes": self._nvme_bytes}
            with contextlib.suppress(OSError):  # the disk may be full for a while: the next beat follows in a second
                write_json(self._files.beat, {**now, **more}, durable=False)


def main(order_file: Path) -> int:
    """Train as the order says; the exit code is that of the command line (`jobs.errors`)."""
    quiet_libraries()
    files = AttemptFiles(order_file.parent)
    order = RunOrder.from_dict(read_json(order_file) or {})
    predicted = order.policy.get("predicted") or {}
    pulse = Pulse(files, predicted.get("nvme_bytes", 0.0))
    outcome, code = end_of(lambda: _train(order, pulse))
    pulse.stop()
    update = {"step": pulse.step, "loss": pulse.loss, "node": order.node, "exit_code": code}
    write_json(files.outcome, outcome.model_copy(update=update).model_dump(mode="json"))
    return code


def end_of(work: Callable[[], dict[str, Any]]) -> tuple[Outcome, int]:
    """How ``work`` ends, whatever it raises: the trace of what is no error of ours goes to the log. ``status`` of what
    it returns is ``done`` or ``stopped``."""
    try:
        result = work()
    except MemoryError:
        return Outcome(how="error", code=OutOfMemory.code, message="out of memory on host"), 1
    except LazytrainError as error:
        print(f"error: {error}", flush=True)
        final = isinstance(error, _FINAL) and not isinstance(error, DeviceBusy)
        said = Outcome(how="error", code=error.code, message=error.message, hint=error.hint, final=final)
        return said, error.exit_code
    except Exception as error:  # the last thing that this process says
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        code = OutOfMemory.code if type(error).__name__ == "OutOfMemoryError" else "unexpected"
        return Outcome(how="error", code=code, message=f"{type(error).__name__}: {first}"), 1
    how = "done" if result["status"] == "done" else "stopped"
    return Outcome(how=how, result=result), 0


def _train(order: RunOrder, pulse: Pulse) -> dict[str, Any]:
    from ...jobs.policy import Policy
    from ...jobs.spec import JobSpec
    from ...jobs.train import Pause, train

    policy = Policy.model_validate(order.policy)
    if order.device["kind"] == "cuda":
        check_gpu(policy.predicted.peak_gpu_bytes if policy.predicted else 0)
    files = JobFiles(order.run_dir)
    asked = asked_to_stop(files.stop)
    result = train(
        JobSpec.model_validate(order.spec),
        policy=policy,
        device=device_of(order.device),
        run_dir=order.run_dir,
        tracker=_tracker(order),
        stop=asked,
        pause=Pause(asked=files.pause.exists, told=pulse.told),
        progress=pulse.hear,
    )
    return result.model_dump(mode="json")


def check_gpu(needed_bytes: int) -> None:
    """Raise DeviceBusy unless this process sees one GPU and that has room: another's process may have come first."""
    import torch

    seen = torch.cuda.device_count()
    if seen != 1:
        raise DeviceBusy(f"the process sees {seen} GPUs where it was given one", hint="lazytrain nodes shows its node")
    free, _ = torch.cuda.mem_get_info()
    if free < needed_bytes:
        raise DeviceBusy(
            f"the GPU has {format_bytes(free)} free, and the plan needs {format_bytes(needed_bytes)}: it is in use",
            hint="nvidia-smi shows what; the job waits until it is gone",
        )


def asked_to_stop(file: Path) -> Callable[[], bool]:
    """Whether the stop file is there or SIGTERM has come."""
    heard = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: heard.set())
    return lambda: heard.is_set() or file.exists()


def device_of(device: Mapping[str, Any]) -> Any:
    """The device of an order, as the executor takes it."""
    from ...jobs.executor import Emulated

    kind = device["kind"]
    if kind != "emulated":
        return kind
    return Emulated(**{name: value for name, value in device.items() if name != "kind"})


def _tracker(order: RunOrder) -> Any:
    if not order.tracking:
        return None
    from ...jobs.tracking import MLflowTracker

    return MLflowTracker(**order.tracking, run_dir=order.run_dir)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
