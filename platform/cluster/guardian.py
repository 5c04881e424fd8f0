"""Ends what a local Ray left behind when the process that started it was killed. Standard library only: see `keeper`.

    python -I -S guardian.py PARENT DIRECTORY

It notes, while PARENT lives, those of its descendants that were started with DIRECTORY, and what they started: other
children of PARENT are none of its business. When its standard input is closed, which PARENT does on purpose or by
dying, it kills those that are left and removes DIRECTORY. Ray's own agents would live on for a minute.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # run as a script, it is no part of a package
from keeper import descendants  # type: ignore[import-not-found]

_LOOK_EVERY_S = 0.5
_GONE_WITHIN_S = 10.0

Seen = dict[int, str]
"""Process numbers, each with the time of its start: a number is used again one day."""


def main(parent: int, directory: Path) -> None:
    """Wait for the end of ``parent``, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they mean the parent
    seen: Seen = {}
    while True:
        seen |= {pid: _started(pid) for pid in _of_ray(parent, directory) if pid != os.getpid()}
        readable, _, _ = select.select([0], [], [], _LOOK_EVERY_S)
        if readable and not os.read(0, 4096):
            break
    _end(seen)
    shutil.rmtree(directory, ignore_errors=True)


def _of_ray(parent: int, directory: Path) -> set[int]:
    """Descendants whose command line names the directory, and theirs."""
    roots = [pid for pid in descendants(parent) if str(directory) in _command(pid)]
    return {*roots, *(pid for root in roots for pid in descendants(root))}


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""


def _end(seen: Seen) -> None:
    deadline = time.monotonic() + _GONE_WITHIN_S
    while time.monotonic() < deadline:
        left = [pid for pid, started in seen.items() if started and _started(pid) == started]
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.05)


def _started(pid: int) -> str:
    """Start time of a process, in clock ticks since boot; empty for one that has ended."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else fields[18]
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
