"""The actor that holds a run's GPU.

Its class goes to its process by value, and nothing here imports anything of ours: a paused job that goes on waits for
this process, and every import would be a part of a second.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from ray.cloudpickle import register_pickle_by_value

_LOOK_EVERY_S = 0.2
_START_TIME = 18
"""Place of the start time in /proc/PID/stat, counted from after the state."""


def start_time(pid: int) -> str:
    """When the process began, in the kernel's ticks; empty when it has ended."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else fields[_START_TIME]
    return ""


class Hold:
    """Holds a GPU and cores, and does nothing else.

    Detached, because Ray may end what belongs to a controller that has ended; it watches over its owner's process
    itself, which is on the same node, so that it never outlives it.
    """

    def __init__(self, pid: int, started: str) -> None:
        self._owner = (pid, started)
        threading.Thread(target=self._leave_with_it, daemon=True).start()

    def there(self) -> int:
        """Number of its process, once Ray has found the place."""
        return os.getpid()

    def hold(self) -> None:
        """Never return: whoever waits for this is told by Ray when the actor has died."""
        threading.Event().wait()

    def _leave_with_it(self) -> None:
        pid, started = self._owner
        while start_time(pid) == started:
            time.sleep(_LOOK_EVERY_S)
        os._exit(0)


register_pickle_by_value(sys.modules[__name__])
