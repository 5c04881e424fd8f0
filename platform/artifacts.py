"""The files of a job on disk: whose they are, how an attempt reports through them, how much of them is read at once.

    RUN_DIR/.owner              id of the job that the directory belongs to
    RUN_DIR/attempts/0001/      one directory for each start, so that an attempt cannot speak for another
        order.json              what the training process was told to do
        started.json            the node was asked to start it
        beat.json               written by the training process now and then while it lives
        outcome.json            how the training ended, in its own words
        searched.json           how the process that searched the batch ended
        exit.json               how its process ended; written when nothing of it lives any more
        log.txt                 what it printed
    RUN_DIR/batch.json          what the search of the batch found, before the training
    RUN_DIR/stop                asks the training to save and leave
    RUN_DIR/pause               asks it to keep its state in host memory and to give its GPU up
    RUN_DIR/policy.next.json    asks it to carry out this policy from the end of the step on

The rest of the directory is that of `jobs.run_directory`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..jobs.errors import InputError

JOB_ID = re.compile(r"j-[0-9a-f]{10}")
OWNER_FILE, STOP_FILE, PAUSE_FILE = ".owner", "stop", "pause"
LOG_BYTES = 64 << 10
"""What is read of a log when nobody asks for more."""
MOST_LOG_BYTES = 4 << 20
_LARGEST_RECORD = 1 << 20
_CHECKPOINTS = "step-*-*"


class JobFiles:
    """Paths of one job's directory."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir)
        self.owner, self.stop = self.path / OWNER_FILE, self.path / STOP_FILE
        self.pause, self.batch = self.path / PAUSE_FILE, self.path / "batch.json"
        self.metrics, self.policy, self.result = (
            self.path / "metrics.jsonl",
            self.path / "policy.json",
            self.path / "result.json",
        )
        self.next_policy = self.path / "policy.next.json"
        self.mlflow = self.path / "mlflow_run.json"
        self.timeline, self.checkpoints, self.model = (
            self.path / "timeline.json",
            self.path / "checkpoints",
            self.path / "model",
        )

    def attempt(self, number: int) -> AttemptFiles:
        """Files of the ``number``-th start, counted from 1."""
        return AttemptFiles(self.path / "attempts" / f"{number:04d}")

    def claim(self, job_id: str) -> None:
        """Make the directory this job's. Raises InputError when it holds files of another job or of nobody."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self._owned_by() == job_id:
                return
            if any(self.path.iterdir()):
                raise InputError(
                    f"{self.path} is not empty and does not belong to job {job_id}", hint="set another output.dir"
                )
            write_json(self.owner, {"job": job_id})
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror}", hint="set output.dir") from error

    def continue_from(self, other: JobFiles) -> int | None:
        """Make the checkpoints of another job this one's too; the step of the newest, None where there is none.

        Their files never change, so that they are linked, not copied; done again it does nothing. Raises InputError
        when the folders are on different disks.
        """
        if not self.checkpoints.exists() and any(other.checkpoints.glob(_CHECKPOINTS)):
            partial = self.path / ".checkpoints"
            shutil.rmtree(partial, ignore_errors=True)
            try:
                for saved in sorted(other.checkpoints.glob(_CHECKPOINTS)):
                    shutil.copytree(saved, partial / saved.name, copy_function=os.link)
                if (other.path / "start").is_dir():
                    shutil.copytree(other.path / "start", self.path / "start", dirs_exist_ok=True)
            except (OSError, shutil.Error) as error:
                hint = "retry it with fresh, or set output.dir to the folder that the job had"
                raise InputError(f"the checkpoints of {other.path} cannot be linked: {error}", hint=hint) from error
            partial.rename(self.checkpoints)
        steps = [int(saved.name.split("-")[1]) for saved in self.checkpoints.glob(_CHECKPOINTS)]
        return max(steps, default=None)

    def belongs_to(self, job_id: str) -> bool:
        """Whether the directory was claimed by this job."""
        return self._owned_by() == job_id

    def _owned_by(self) -> str | None:
        record = read_json(self.owner)
        return str(record["job"]) if record and "job" in record else None


class AttemptFiles:
    """Paths of one start of a job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.order, self.started, self.beat, self.outcome, self.exit, self.log = (
            path / "order.json",
            path / "started.json",
            path / "beat.json",
            path / "outcome.json",
            path / "exit.json",
            path / "log.txt",
        )
        self.searched = path / "searched.json"


def secret_file(path: Path) -> str:
    """The secret in the file, made on first use, for its owner only. Raises InputError if others may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            raise InputError(f"others may read {path}", hint=f"chmod 600 {path}, or delete it for a new one") from None
        return path.read_text(encoding="utf-8").strip()
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secret := secrets.token_hex(32))
    return secret


def inside(path: Path, folder: Path) -> bool:
    """Whether the path, with all symbolic links followed, lies in the folder."""
    return path.resolve().is_relative_to(folder.resolve())


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write a small record so that it is there whole or not at all; if ``durable``, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, allow_nan=False)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """A small record; None when it is not there, damaged or too large to be one."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_RECORD + 1)
        value = json.loads(content) if len(content) <= _LARGEST_RECORD else None
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_log(path: Path, *, offset: int | None = None, limit: int = LOG_BYTES) -> tuple[str, int]:
    """Text of a log from byte ``offset`` on, and the offset behind it; without one, its last ``limit`` bytes.

    Whatever its size, ``limit`` bytes are read at most. A line that was overwritten with carriage returns shows its
    last state; bytes that are no UTF-8 become U+FFFD. A part before the end of the log ends where a line does, if it
    holds one. An absent log is empty.
    """
    limit = min(limit, MOST_LOG_BYTES)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - limit) if offset is None else min(offset, size)
            file.seek(start)
            content = file.read(limit)
    except (FileNotFoundError, NotADirectoryError):
        return "", 0
    if start + len(content) < size:
        content = content[: content.rfind(b"\n") + 1] or content
    return as_text(content), start + len(content)


def as_text(content: bytes) -> str:
    """Printed bytes as a terminal would leave them."""
    text = content.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\x00", "\ufffd")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def last_lines(path: Path, count: int) -> str:
    """The last ``count`` lines of a log, from at most its last 4 MiB."""
    text, _ = read_log(path, limit=min(MOST_LOG_BYTES, max(LOG_BYTES, count * 400)))
    return "\n".join(text.rstrip("\n").split("\n")[-count:])


def read_rows(path: Path, *, offset: int = 0, limit_bytes: int = 1 << 20) -> tuple[list[dict[str, Any]], int]:
    """Complete JSON lines from byte ``offset`` on, and the offset behind the last; damaged lines are passed over."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(limit_bytes)
    except FileNotFoundError:
        return [], 0
    end = content.rfind(b"\n") + 1
    return list(_rows(content[:end])), offset + end


def _rows(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.split(b"\n"):
        try:
            row = json.loads(line) if line else None
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
