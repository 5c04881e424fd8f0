"""A run's directory: it belongs to one job file, is used by one process at a time, and is complete in itself.

job.yaml            the resolved job file
policy.json         what was planned
provenance.json     versions and git checkouts of the last process that worked on it
metrics.jsonl       one line per report
timeline.json       the operations of a step, one in a while
steps.json          those of the few steps from that one on, to which the machine's profile is fitted
calibration.json    how far off the predicted step time was before that, and is
start/              configuration and tokenizer that the run began with
frozen.safetensors  weights that do not learn, where the job freezes some: no checkpoint holds them
checkpoints/        see `checkpoint`
verdicts.jsonl      every evaluated row: prompt, output, expected, correct
model/              the trained model in Hugging Face layout, or its adapters in that of peft
status.json         whether a process is at it, or how the last one ended
result.json         written last: the run is done
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from pydantic import ValidationError

from .errors import CheckpointError, InputError, LazytrainError
from .frozen import Frozen, digest
from .spec import JobSpec, load_spec

LOCK = ".run.lock"
SHAPING = ("model", "data", "train", "lora", "optimizer")
"""Sections that shape what is learned: a run cannot go on under others."""
MAY_CHANGE = {"batch", "cache"}
"""Keys of them that it can: how many rows a step takes, and where tokenized rows are kept."""

WATCHED = ".owner"
"""A file in the directories of a service's jobs. The service knows better how they ended, and says so itself; it never
has two of a job's processes train at once."""
_PATIENCE_S = 0.5
"""For the lock: who only asks whether a run lives holds it for a moment."""
_PATIENCE_WATCHED_S = 60.0
"""The same in a directory of the service's: what MLflow has to hear of the process before is told under the lock."""

State = Literal["running", "done", "stopped", "failed", "lost"]


class RunStatus(Frozen):
    """How the last process of a run is, or ended."""

    state: State
    """``stopped`` was asked for, ``failed`` raised an error, ``lost`` ended without a word (killed, power cut)."""
    attempt: int
    """Processes that have worked on the run, this one included."""
    host: str
    pid: int
    started: float
    """Unix time in seconds, as is ``ended``."""
    ended: float | None = None
    error: str = ""
    """What was raised, where it failed."""


class RunDirectory:
    """Paths of one run, and the claim on them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec, self.policy, self.metrics = path / "job.yaml", path / "policy.json", path / "metrics.jsonl"
        self.checkpoints, self.model = path / "checkpoints", path / "model"
        self.next_policy, self.timeline = path / "policy.next.json", path / "timeline.json"
        self.steps, self.calibration = path / "steps.json", path / "calibration.json"
        self.provenance = path / "provenance.json"
        self.start, self.rows = path / "start", path / "rows"
        self.frozen, self.status_file = path / "frozen.safetensors", path / "status.json"
        self.verdicts, self.result = path / "verdicts.jsonl", path / "result.json"

    @contextmanager
    def claimed(self, spec: JobSpec) -> Iterator[None]:
        """Hold the directory for this process.

        Raises InputError if another process has it or it cannot be written, CheckpointError if another job has it;
        LazytrainError if a service's MLflow has not heard of the process before for a minute.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / LOCK).open("a")
        except OSError as error:
            raise self._unwritable(error) from error
        with lock:
            watched = (self.path / WATCHED).exists()
            if not _taken(lock, patience_s=_PATIENCE_WATCHED_S if watched else _PATIENCE_S):
                raise self._held(watched)
            try:
                self._own(spec)
                self._begin()
            except OSError as error:
                raise self._unwritable(error) from error
            yield

    @contextmanager
    def unclaimed(self) -> Iterator[bool]:
        """Whether no process holds the directory; if so, none can until the end of the block."""
        try:
            lock = (self.path / LOCK).open("r+")
        except OSError as error:  # no process has ever held it, or it is not for us to know
            yield isinstance(error, FileNotFoundError)
            return
        with lock:
            yield _taken(lock)

    def status(self) -> RunStatus | None:
        """How the run is, as far as this machine can tell; None where none was begun."""
        found = self._written_status()
        if found is None or found.state != "running":
            return found
        with self.unclaimed() as dead:
            found = self._written_status()
            return found.model_copy(update={"state": "lost"}) if found and dead and self.lost() else found

    def lost(self) -> bool:
        """Whether the last process has not said how it ended; only for who holds the directory or knows it is dead."""
        status = self._written_status()
        return status is not None and status.state == "running"

    def end(self, state: State, error: str = "") -> None:
        """Say how the process that holds the directory, or held it, has ended."""
        status = self._written_status()
        if status is not None:
            ended = {"state": state, "ended": time.time(), "error": error}
            save_record(self.status_file, status.model_copy(update=ended))

    def _begin(self) -> None:
        before = self._written_status()
        attempt = before.attempt + 1 if before is not None else 1
        status = RunStatus(
            state="running", attempt=attempt, host=socket.gethostname(), pid=os.getpid(), started=time.time()
        )
        save_record(self.status_file, status)

    def _written_status(self) -> RunStatus | None:
        try:
            return RunStatus.model_validate_json(self.status_file.read_bytes())
        except (OSError, ValidationError):
            return None

    def _held(self, watched: bool) -> LazytrainError:
        if watched:
            words = f"{self.path} is still held by whoever tells MLflow of the process that trained here before"
            return LazytrainError(words, hint="see whether MLflow answers")
        return InputError(f"another process is training in {self.path}", hint="give every run its own output.dir")

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(f"cannot write to {self.path}: {error.strerror}", hint="set output.dir, or free some space")

    def _own(self, spec: JobSpec) -> None:
        if self.spec.exists():
            before = load_spec(self.spec)
            changed = [name for name in SHAPING if _digest(before, name) != _digest(spec, name)]
            if changed and self.checkpoints.exists():
                raise CheckpointError(
                    f"{self.path} holds a run of another job file: {', '.join(changed)} differ",
                    hint=f"set another output.dir, or delete {self.path} to start again",
                )
        write_atomically(self.spec, spec.to_yaml())


def _taken(lock: IO[str], patience_s: float = 0.0) -> bool:
    """Whether this process has the lock now."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        else:
            return True


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def save_record(path: Path, record: Frozen) -> None:
    """Write a value as JSON, atomically."""
    write_atomically(path, record.model_dump_json(indent=1) + "\n")


def _digest(spec: JobSpec, section: str) -> str:
    value = getattr(spec, section)
    return digest(None if value is None else value.model_dump(mode="json", exclude=MAY_CHANGE))
