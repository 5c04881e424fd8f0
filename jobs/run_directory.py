"""A run's directory: it belongs to one job file, is used by one process at a time, and is complete in itself.

job.yaml            the resolved job file
policy.json         what was planned
metrics.jsonl       one line per report
timeline.json       the operations of a step, one in a while
start/              configuration and tokenizer that the run began with
checkpoints/        see `checkpoint`
verdicts.jsonl      every evaluated row: prompt, output, expected, correct
model/              the trained model in Hugging Face layout, or its adapters in that of peft
result.json         written last: the run is done
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CheckpointError, InputError
from .frozen import Frozen, digest
from .spec import JobSpec, load_spec

LOCK = ".run.lock"
SHAPING = ("model", "data", "train", "lora", "optimizer")
"""Sections that shape what is learned: a run cannot go on under others."""
MAY_CHANGE = {"batch", "cache"}
"""Keys of them that it can: how many rows a step takes, and where tokenized rows are kept."""


class RunDirectory:
    """Paths of one run, and the claim on them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec, self.policy, self.metrics = path / "job.yaml", path / "policy.json", path / "metrics.jsonl"
        self.checkpoints, self.model = path / "checkpoints", path / "model"
        self.timeline = path / "timeline.json"
        self.start, self.rows = path / "start", path / "rows"
        self.verdicts, self.result = path / "verdicts.jsonl", path / "result.json"

    @contextmanager
    def claimed(self, spec: JobSpec) -> Iterator[None]:
        """Hold the directory for this process. Raises InputError if another process or another job has it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / LOCK).open("a")
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror}", hint="set output.dir") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another process is training in {self.path}", hint="give every run its own output.dir"
                ) from None
            self._own(spec)
            yield

    def in_use(self) -> bool:
        """Whether a process holds the directory."""
        try:
            lock = (self.path / LOCK).open("a")
        except OSError:
            return False
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

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


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def save_record(path: Path, record: Frozen) -> None:
    """Write a value as JSON, atomically."""
    write_atomically(path, record.model_dump_json(indent=1) + "\n")


def _digest(spec: JobSpec, section: str) -> str:
    value = getattr(spec, section)
    return digest(None if value is None else value.model_dump(mode="json", exclude=MAY_CHANGE))
