"""What is said while work goes on, what is written down for later, and which libraries are kept from interrupting."""

from __future__ import annotations

import logging
import os
import traceback
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

_CHATTY = ("ray", "mlflow", "alembic", "transformers", "datasets", "httpx", "urllib3", "asyncio", "filelock")


class Reporter(Protocol):
    """Where long work says how far it is; the command line draws bars, a test collects."""

    def stage(self, title: str, total: float | None = None) -> None:
        """A new stage begins and the one before is done. Without ``total`` nobody knows how long it takes."""

    def advance(self, done: float, text: str = "") -> None:
        """The stage has come to ``done`` of its total; ``text`` says what is going on."""

    def say(self, text: str) -> None:
        """A line that stays on the screen."""


class Silent:
    """A Reporter for callers who do not want to hear anything."""

    def stage(self, title: str, total: float | None = None) -> None:
        """Nothing."""

    def advance(self, done: float, text: str = "") -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""


def quiet_libraries(level: int = logging.ERROR) -> None:
    """Let the libraries below us speak only from ``level`` on; our own messages go through a Reporter.

    Called before they are imported: some read how loud they may be only then. Processes started later inherit it.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in _CHATTY:
        logging.getLogger(name).setLevel(level)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def write_trace(error: BaseException, directory: Path) -> Path:
    """Write the full trace of ``error`` to a new file (mode 0600) in ``directory`` and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
    path = directory / f"error-{stamp}.log"
    path.touch(mode=0o600)
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return path
