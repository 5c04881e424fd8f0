"""Runs one command so that nothing of it is left, whatever happens. Standard library only: started with ``-I -S``.

    python -I -S keeper.py EXIT_FILE HOST_BYTES COMMAND ...

The command gets a session of its own and no input. When it ends, is asked to (SIGTERM here), passes HOST_BYTES of
memory (0: no limit), or when this process's own standard input is closed, which happens when whoever started it dies,
everything that descends from it is killed, also what has left its session. Then EXIT_FILE is written:

    {"exit_code": 0, "signal": null, "because": "", "peak_host_bytes": 123}

``because`` is empty, ``asked``, ``host_memory`` or ``host_lost``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.2
_GONE_WITHIN_S = 10.0
_FULL_FOR_S = 60.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str]) -> int:
    """Run the command and give its exit code, or 128 and the signal that ended it."""
    exit_file, host_bytes, command = Path(arguments[0]), int(arguments[1]), arguments[2:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    # Descendants whose parent died become our children, so that none of them gets out of sight.
    prctl(_SET_CHILD_SUBREAPER, 1)
    asked = _Asked()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL),  # single-threaded here, so it is safe
    )
    because, peak = _wait(child, host_bytes, asked)
    if because:
        child.kill()
    code = child.wait()
    end_descendants()
    ended: dict[str, object] = {
        "exit_code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "because": because,
        "peak_host_bytes": peak,
    }
    _write_in_time(exit_file, ended)
    return code if code >= 0 else 128 - code


class _Asked:
    """Whether SIGTERM or SIGINT has come."""

    def __init__(self) -> None:
        self.yes = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.yes = True


def _wait(child: subprocess.Popen[bytes], host_bytes: int, asked: _Asked) -> tuple[str, int]:
    """Until the child ends or has to: why it had to, and the most memory that was seen in use."""
    peak = 0
    while child.poll() is None:
        peak = max(peak, used := sum(_private_bytes(pid) for pid in descendants(os.getpid())))
        if asked.yes:
            return "asked", peak
        if host_bytes and used > host_bytes:
            return "host_memory", peak
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if readable and not os.read(0, 4096):
            return "host_lost", peak
    return "", peak


def end_descendants() -> None:
    """Kill everything below this process and wait until it is gone."""
    deadline = time.monotonic() + _GONE_WITHIN_S
    while time.monotonic() < deadline:
        alive = list(descendants(os.getpid()))
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not alive:
            return
        time.sleep(0.02)


def descendants(pid: int) -> Iterator[int]:
    """Processes below ``pid``, children first; those that have ended already are passed over."""
    for child in _children(pid):
        if _state(child) != "Z":
            yield child
        yield from descendants(child)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += [int(word) for word in (task / "children").read_text().split()]
    return found


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def _private_bytes(pid: int) -> int:
    """Resident memory that is not backed by a file: mapped weights and libraries can be dropped by the kernel."""
    with contextlib.suppress(OSError, ValueError):
        _, resident, shared, *_ = (int(word) for word in Path(f"/proc/{pid}/statm").read_text().split())
        return (resident - shared) * _PAGE
    return 0


def _write_in_time(path: Path, value: dict[str, object]) -> None:
    """Its disk may be full for a while; without the word that it leaves here, the run counts as lost."""
    deadline = time.monotonic() + _FULL_FOR_S
    while True:
        try:
            return _write(path, value)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise
            print(f"cannot write {path}: {error}", file=sys.stderr)
            time.sleep(1.0)


def _write(path: Path, value: dict[str, object]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
