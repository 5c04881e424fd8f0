"""Keeps the service's processes running: starts them, starts them again when they die, stops them in reverse order.

    HOME/run/services.json      what to run: names and commands, in the order of starting
    HOME/run/NAME.pid           process number and start time of each, also of the supervisor itself
    HOME/logs/NAME.log          what each printed

A supervisor that was killed leaves its processes running; the next one takes them over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..jobs.errors import Conflict
from .artifacts import read_json, write_json

NAME = "supervisor"
_LOOK_EVERY_S = 0.3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STEADY_S = 20.0
"""A process that lived this long is started again without a pause."""
_STOP_S = 25.0
_LOG_BYTES = 16 << 20


@dataclass(frozen=True)
class Process:
    """A process by number and start time: a number is used again one day."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process with this number now."""
        started = _start_time(pid)
        return cls(pid, started) if started else None

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return _start_time(self.pid) == self.started

    def end(self, patience_s: float = _STOP_S) -> None:
        """SIGTERM, and after ``patience_s`` SIGKILL."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Place:
    """The files of the supervisor in one home directory."""

    def __init__(self, home: Path) -> None:
        self.run, self.logs = home / "run", home / "logs"
        self.services = self.run / "services.json"

    def process(self, name: str) -> Process | None:
        """The process of that name, if it is alive."""
        record = read_json(self.run / f"{name}.pid")
        found = Process(int(record["pid"]), str(record["started"])) if record else None
        return found if found is not None and found.alive else None

    def note(self, name: str, process: Process) -> None:
        """Remember the process of that name."""
        write_json(self.run / f"{name}.pid", {"pid": process.pid, "started": process.started})

    def log(self, name: str) -> Path:
        """Log of that name; one that has grown large is put aside first."""
        path = self.logs / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > _LOG_BYTES:
            path.replace(path.with_suffix(".old.log"))
        return path

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the place for this supervisor. Raises Conflict when another one has it."""
        self.run.mkdir(parents=True, exist_ok=True)
        with (self.run / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict(f"the service of {self.run.parent} is running already", hint="lazytrain down") from None
            yield


@dataclass
class _Kept:
    """A service with its process, and when it is started again."""

    name: str
    command: Sequence[str]
    process: Process | None = None
    since: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    not_before: float = 0.0

    def look(self, place: Place, now: float) -> None:
        """Start it if it is not alive and its pause is over."""
        _reap()
        if self.process is not None and self.process.alive:
            return
        if self.process is not None:
            steady = now - self.since >= _STEADY_S
            self.pause_s = _FIRST_PAUSE_S if steady else min(2 * self.pause_s, _LONGEST_PAUSE_S)
            self.not_before, self.process = now + (0.0 if steady else self.pause_s), None
        if now >= self.not_before:
            self._start(place, now)

    def _start(self, place: Place, now: float) -> None:
        """A full disk or a machine without a free process must not end the supervisor: it tries again."""
        try:
            with place.log(self.name).open("ab") as log:
                self.process, self.since = start(self.command, log), now
            place.note(self.name, self.process)
        except OSError as error:
            print(f"{self.name}: {error}", file=sys.stderr, flush=True)
            self.not_before = now + self.pause_s


def start(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str] | None = None) -> Process:
    """Start a command in a session of its own, without input, its output in a file."""
    child = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    )
    return Process.of(child.pid) or Process(child.pid, "")


def supervise(home: Path, told: threading.Event) -> None:
    """Keep the services of ``HOME/run/services.json`` running until ``told``, then stop them. Raises Conflict."""
    place = Place(home)
    with place.alone():
        place.note(NAME, Process.of(os.getpid()) or Process(os.getpid(), ""))
        services = json.loads(place.services.read_text(encoding="utf-8"))
        kept = [_Kept(name, command, place.process(name)) for name, command in services.items()]
        while not told.wait(_LOOK_EVERY_S):
            for service in kept:
                service.look(place, time.monotonic())
        for service in reversed(kept):
            if service.process is not None:
                service.process.end()


def stop(home: Path) -> list[str]:
    """Stop the supervisor and everything that it left; names of what was running."""
    place = Place(home)
    names = list(read_json(place.services) or {})
    running = [name for name in (NAME, *reversed(names)) if place.process(name) is not None]
    for name in running:
        process = place.process(name)
        if process is not None:
            process.end(_STOP_S * (len(names) + 1) if name == NAME else _STOP_S)
    return running


def _reap() -> None:
    """Take note of children that have ended: until then they count as there."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _start_time(pid: int) -> str:
    """In clock ticks since boot; empty for a process that has ended."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else fields[18]
    return ""


def main() -> None:
    """``python -m lazytrain.platform.supervisor HOME``"""
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: told.set())
    supervise(Path(sys.argv[1]), told)


if __name__ == "__main__":
    main()
