"""The training process of a run: does what its order says, gives signs of life, and says how it ended.

python -m lazytrain.platform.cluster.run_process ATTEMPT_DIRECTORY/order.json
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...jobs.errors import (
    CheckpointError,
    DoesNotFit,
    InputError,
    LazytrainError,
    NonFiniteGradient,
    OutOfMemory,
    ProgramError,
)
from ..artifacts import AttemptFiles, read_json, write_json
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
        self._count = 0
        self._done = threading.Event()
        self.step, self.total_steps, self.step_s = 0, 0, 0.0
        self.loss: float | None = None
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def hear(self, record: Mapping[str, float]) -> None:
        """A report of the training loop."""
        self.step, self.total_steps = int(record["step"]), int(record["total_steps"])
        self.step_s = record.get("step_s", self.step_s)
        loss = record.get("loss")
        self.loss = loss if loss is not None and loss == loss else self.loss

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
        self._count += 1
        now = {"beat": self._count, "step": self.step, "total_steps": self.total_steps, "step_s": self.step_s}
        write_json(self._files.beat, {**now, "nvme_bytes": self._nvme_bytes}, durable=False)


def main(order_file: Path) -> int:
    """Train as the order says; the exit code is that of the command line (`jobs.errors`)."""
    quiet_libraries()
    files = AttemptFiles(order_file.parent)
    order = RunOrder.from_dict(read_json(order_file) or {})
    predicted = order.policy.get("predicted") or {}
    pulse = Pulse(files, predicted.get("nvme_bytes", 0.0))
    outcome, code = _end_of(order, pulse)
    pulse.stop()
    update = {"step": pulse.step, "loss": pulse.loss, "node": order.node, "exit_code": code}
    write_json(files.outcome, outcome.model_copy(update=update).model_dump(mode="json"))
    return code


def _end_of(order: RunOrder, pulse: Pulse) -> tuple[Outcome, int]:
    """How the training ends, whatever it raises: the trace of what is no error of ours goes to the log."""
    try:
        result = _train(order, pulse)
    except MemoryError:
        return Outcome(how="error", code=OutOfMemory.code, message="out of memory on host"), 1
    except LazytrainError as error:
        print(f"error: {error}", flush=True)
        final = isinstance(error, _FINAL)
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
    from ...jobs.train import train

    asked = _asked_to_stop(order.run_dir / "stop")
    result = train(
        JobSpec.model_validate(order.spec),
        policy=Policy.model_validate(order.policy),
        device=_device(order.device),
        run_dir=order.run_dir,
        tracker=_tracker(order),
        stop=asked,
        progress=pulse.hear,
    )
    return result.model_dump(mode="json")


def _asked_to_stop(file: Path) -> Any:
    """Whether the stop file is there or SIGTERM has come."""
    heard = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: heard.set())
    return lambda: heard.is_set() or file.exists()


def _device(device: Mapping[str, Any]) -> Any:
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
