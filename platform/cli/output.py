"""Where results and progress go: results to stdout (for ``--json`` one object and nothing else), progress to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

Renderer = Callable[[Console], None]


class Answered(int):
    """Exit code of a command that has given its answer all the same: with 2, nothing is said about usage."""


class Output:
    """One command's way to the outside."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._stdout = sys.stdout

    @classmethod
    @contextlib.contextmanager
    def opened(cls, as_json: bool) -> Iterator[Output]:
        """With ``as_json``, all that anybody but `result` prints meanwhile goes to stderr."""
        output = cls(as_json)
        if not as_json:
            yield output
            return
        with _only_ours_on_stdout(output):
            yield output

    def result(self, data: Mapping[str, Any], render: Renderer) -> None:
        """The command's answer: ``data`` as JSON, or ``render`` drawing it for a person."""
        if self.as_json:
            print(json.dumps(data, allow_nan=False), file=self._stdout, flush=True)
        else:
            render(Console(file=self._stdout))

    @contextlib.contextmanager
    def progress(self) -> Iterator[Bars]:
        """Bars on stderr while the block runs; without a terminal there, nothing."""
        console = Console(stderr=True)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
            yield Bars(bars)


@contextlib.contextmanager
def _only_ours_on_stdout(output: Output) -> Iterator[None]:
    if _descriptor(sys.stdout) != 1:  # replaced by a test or a caller: there is no file descriptor to guard
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(kept, "w", encoding="utf-8") as real:
        output._stdout = real
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)


def _descriptor(stream: Any) -> int:
    try:
        return int(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return -1


class Bars:
    """A `logs.Reporter` that draws one bar per stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def stage(self, title: str, total: float | None = None) -> None:
        """A new bar; the one before is full."""
        self.finish()
        self._task = self._progress.add_task(title, total=total, text="")

    def advance(self, done: float, text: str = "") -> None:
        """Move the current bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, text=text)

    def set_total(self, total: float) -> None:
        """The current stage turns out to have this total."""
        if self._task is not None and self._progress.tasks[self._task].total != total:
            self._progress.update(self._task, total=total)

    def say(self, text: str) -> None:
        """A line above the bars."""
        if not self._progress.disable:
            self._progress.console.print(text)

    def finish(self) -> None:
        """Fill the current bar."""
        if self._task is not None:
            total = self._progress.tasks[self._task].total or 1.0
            self._progress.update(self._task, total=total, completed=total)
            self._progress.stop_task(self._task)
        self._task = None
