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

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel, ValidationError

from ..jobs.errors import InputError, Unreachable

Record = TypeVar("Record", bound=BaseModel)
JOB_ID = re.compile(r"j-[0-9a-f]{10}")
OWNER_FILE, STOP_FILE, PAUSE_FILE = ".owner", "stop", "pause"
LOG_BYTES = 64 << 10
"""What is read of a log when nobody asks for more."""
MOST_LOG_BYTES = 4 << 20
_LARGEST_RECORD = 1 << 20
_SHORTEST_SECRET = 16
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOMEM)
"""Errors of disks that are over one day, without a change of the job."""
_CHECKPOINTS = "step-*-*"
_HALF_CLAIMED = f".{OWNER_FILE}."
"""What is left of a claim that a kill has interrupted: see `write_json`."""


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
        self.steps, self.calibration = self.path / "steps.json", self.path / "calibration.json"
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
        """Make the directory this job's. Raises InputError when it holds files of another job or of nobody, Unreachable
        as long as its disk is full or does not answer."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self._owned_by() == job_id:
                return
            if not all(found.name.startswith(_HALF_CLAIMED) for found in self.path.iterdir()):
                raise InputError(
                    f"{self.path} is not empty and does not belong to job {job_id}", hint="set another output.dir"
                )
            write_json(self.owner, {"job": job_id})
        except OSError as error:
            raise _typed(error)(f"cannot write to {self.path}: {error.strerror}", hint="set output.dir") from error

    def continue_from(self, other: JobFiles) -> int | None:
        """Make the checkpoints of another job this one's too; the step of the newest, None where there is none.

        Their files never change, so that they are linked, not copied; done again it does nothing. Raises InputError
        when the folders are on different disks, Unreachable as long as a disk is full or does not answer.
        """
        if not self.checkpoints.exists() and any(other.checkpoints.glob(_CHECKPOINTS)):
            partial = self.path / ".checkpoints"
            shutil.rmtree(partial, ignore_errors=True)
            try:
                for saved in sorted(other.checkpoints.glob(_CHECKPOINTS)):
                    shutil.copytree(saved, partial / saved.name, copy_function=os.link)
                if (other.path / "start").is_dir():
                    shutil.copytree(other.path / "start", self.path / "start", dirs_exist_ok=True)
            except OSError as error:
                hint = "retry it with fresh, or set output.dir to the folder that the job had"
                raise _typed(error)(f"the checkpoints of {other.path} cannot be linked: {error}", hint=hint) from error
            partial.rename(self.checkpoints)
        steps = [int(saved.name.split("-")[1]) for saved in self.checkpoints.glob(_CHECKPOINTS)]
        return max(steps, default=None)

    def belongs_to(self, job_id: str) -> bool:
        """Whether the directory was claimed by this job."""
        return self._owned_by() == job_id

    def _owned_by(self) -> str | None:
        record = read_json(self.owner)
        return str(record["job"]) if record and "job" in record else None


def _typed(error: OSError) -> type[InputError | Unreachable]:
    """Of several errors at once, which `shutil` raises, only words are left."""
    passing = error.errno in _PASSING or any(os.strerror(number) in str(error) for number in _PASSING)
    return Unreachable if passing else InputError


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
    """The secret in the file, made on first use, for its owner only. Raises InputError if others may read it, or if
    there is hardly anything in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _make_secret(path)
    if path.stat().st_mode & 0o077:
        raise InputError(f"others may read {path}", hint=f"chmod 600 {path}, or delete it for a new one")
    secret = path.read_text(encoding="utf-8").strip()
    if len(secret) < _SHORTEST_SECRET:
        raise InputError(f"{path} holds no secret: it is too short", hint="delete it for a new one")
    return secret


def _make_secret(path: Path) -> None:
    """Never by halves: a disk that is full, or a kill, must not leave an empty secret, which anybody would know."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return  # another process was faster: its secret counts
        except OSError:  # a file system without links
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def inside(path: Path, folder: Path) -> bool:
    """Whether the path, with all symbolic links followed, lies in the folder."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))  # a loop of links has no resolve()


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


def _opened(path: Path) -> BinaryIO:
    """A file to read. Whoever looks at what a job has left must not wait for the other end of a pipe in its place."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "is no file", str(path))
    return os.fdopen(descriptor, "rb")


def read_json(path: Path) -> dict[str, Any] | None:
    """A small record; None when it is not there, damaged or too large to be one."""
    try:
        with _opened(path) as file:
            content = file.read(_LARGEST_RECORD + 1)
        value = json.loads(content) if len(content) <= _LARGEST_RECORD else None
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_record(kind: type[Record], path: Path) -> Record | None:
    """A small record of a kind; None when it is not there, or is not one: files of a job are its user's to damage, and
    another version of ours may have written them."""
    found = read_json(path)
    try:
        return kind.model_validate(found) if found is not None else None
    except ValidationError:
        return None


def read_log(path: Path, *, offset: int | None = None, limit: int = LOG_BYTES) -> tuple[str, int]:
    """Text of a log from byte ``offset`` on, and the offset behind it; without one, its last ``limit`` bytes.

    Whatever its size, ``limit`` bytes are read at most. A line that was overwritten with carriage returns shows its
    last state; bytes that are no UTF-8 become U+FFFD. A part before the end of the log ends where a line does, if it
    holds one. An absent log is empty.
    """
    limit = min(limit, MOST_LOG_BYTES)
    try:
        with _opened(path) as file:
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
        with _opened(path) as file:
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
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row
