"""Telling MLflow what happened to jobs, beside the controller, which has no time to wait for it."""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

JOBS_THAT_ENDED: Final = "lazytrain.platform.tracking"
"""Hears the ids of jobs that have ended; without any, looks for those that ended lately."""
RUNS_THAT_DIED: Final = "lazytrain.platform.controller.lost_runs"
"""Hears the directories of runs that died without a word, also of those whose jobs go on later."""
_AT_ONCE = 100
_LONGEST_S = 600.0
"""An MLflow that does not answer keeps a process no longer than this."""
Run = Callable[[list[str]], object]


class Telling:
    """Runs a module with all that it has to be told since last time, in one process at a time: each takes seconds to
    import, and as long as MLflow likes to answer."""

    def __init__(self, module: str, *, first: bool = False, run: Run | None = None) -> None:
        """``first``: the module is run once at the beginning, with nothing, for what a controller before left."""
        self._run = run or _in_a_process(module)
        self._heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._go, args=(first,), name=f"telling-{module}", daemon=True).start()

    def __call__(self, what: str) -> None:
        """One more; returns at once."""
        self._heard.put(what)

    def _go(self, first: bool) -> None:
        if first:
            self._tell([])
        while True:
            found = [self._heard.get()]
            while not self._heard.empty() and len(found) < _AT_ONCE:
                found.append(self._heard.get())
            self._tell(found)

    def _tell(self, found: list[str]) -> None:
        """Whatever keeps one of them from being told, the next ones have their turn."""
        try:
            self._run(found)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("MLflow has not heard of %s: %s", ", ".join(found) or "what ended lately", error)


def _in_a_process(module: str) -> Run:
    def run(found: list[str]) -> None:
        command = [sys.executable, "-m", module, *found]
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_LONGEST_S, check=False)

    return run
