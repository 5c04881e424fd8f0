"""Planning in processes of its own: it brings torch and takes seconds, and the controller has to go on meanwhile.

Orders and answers are lines of JSON on a process's standard input and output; when the controller dies, the input is
closed and the process ends.
"""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ...jobs.errors import LazytrainError, error_of
from .values import Admission, AdmissionOrder, Answer, Found, Question

log = logging.getLogger(__name__)

_MODULE = "lazytrain.platform.admission.process"
_AHEAD = 2
"""Orders that a process has at once: one that it plans, one so that it is not idle; an urgent one waits for both."""
_SLOW_S = 60.0
"""An order that takes longer than this, because its rows are many or its disk hangs, keeps its process to itself."""
_MOST_PROCESSES = 3


class PlannerProcess:
    """Implements `values.Planner`. A process is started when there is something to plan, and again if it dies; another
    one while an order is slow and others wait.

    Orders of higher priority go first, then those of users who have fewer before them, and then older ones.
    """

    def __init__(
        self,
        log_file: Path,
        module: str = _MODULE,
        clock: Callable[[], float] = time.monotonic,
        *,
        niceness: int = 0,
    ) -> None:
        """``niceness`` is how far its processes stand back behind others, as ``nice -n`` has it."""
        self._log_file = log_file
        self._command = [*(["nice", "-n", str(niceness)] if niceness else []), sys.executable, "-m", module]
        self._clock = clock
        self._workers: list[_Worker] = []
        self._waiting: dict[str, AdmissionOrder | Question] = {}
        """All orders that have no answer, in the order in which they came."""
        self._blamed: set[str] = set()
        """Jobs of which a process has died once."""
        self._found: dict[str, Found] = {}

    def submit(self, order: AdmissionOrder | Question) -> None:
        """Take the order, unless a process has it already."""
        if order.job not in self._taken():
            self._waiting[order.job] = order
            self._feed()

    def results(self) -> dict[str, Found]:
        """Answers that have come in. When a process died, its orders are sent again, but one of which two have died."""
        for worker in list(self._workers):
            for answer in worker.answers():
                self._take(answer)
            if worker.ended:
                self._bury(worker)
        self._feed()
        found, self._found = self._found, {}
        return found

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _taken(self) -> set[str]:
        """Jobs that need not be sent. What a process has behind a slow order is sent to another one as well."""
        now = self._clock()
        return {job for worker in self._workers for job in (worker.sent[:1] if worker.slow(now) else worker.sent)}

    def _take(self, answer: dict[str, Any]) -> None:
        job = answer["job"]
        if self._waiting.pop(job, None) is None:
            return
        for worker in self._workers:
            worker.forget(job, self._clock())
        self._blamed.discard(job)
        if "error" in answer:
            self._found[job] = error_of(**answer["error"])
        elif "values" in answer:
            self._found[job] = Answer(values=answer["values"])
        else:
            self._found[job] = Admission.model_validate(answer["admission"])

    def _bury(self, worker: _Worker) -> None:
        """The order that it died of is its oldest one; whoever sent it hears of it when that has happened twice.

        Once may be anybody's fault: the kernel ends a process when another one takes the memory.
        """
        code = worker.end()
        log.warning("a planning process ended with %d", code)
        self._workers.remove(worker)
        job = worker.sent[0] if worker.sent else None
        if job is None or job not in self._waiting:
            return
        if job not in self._blamed:
            self._blamed.add(job)
            return
        self._blamed.discard(job)
        del self._waiting[job]
        self._found[job] = LazytrainError(
            f"the planning process died ({code}) while it planned this job",
            hint=f"its log is {self._log_file}; the host may have too little memory",
        )

    def _feed(self) -> None:
        """Let the process that is not slow have the next orders; one more process than slow orders is enough."""
        now = self._clock()
        quick = [worker for worker in self._workers if not worker.slow(now)]
        for extra in [worker for worker in quick[1:] if not worker.sent]:
            extra.end()
            self._workers.remove(extra)
        worker = quick[0] if quick else None
        if worker is None and len(self._workers) >= _MOST_PROCESSES:
            return
        while worker is None or len(worker.sent) < _AHEAD:
            order = self._next()
            worker = (worker or self._start()) if order is not None else None
            if order is None or worker is None:
                return
            worker.send(order.job, json.dumps(asdict(order)), now)

    def _next(self) -> AdmissionOrder | Question | None:
        """Of the highest priority, the first of the user of whom the fewest others are before it: whoever submits
        thousands waits for them, and nobody else does."""
        taken, before = self._taken(), Counter[tuple[int, str]]()
        best: tuple[int, int] | None = None
        found: AdmissionOrder | Question | None = None
        for order in self._waiting.values():
            whose = (order.priority, getattr(order, "user", ""))
            place = (-order.priority, before[whose])
            before[whose] += 1
            if order.job not in taken and (best is None or place < best):
                best, found = place, order
        return found

    def _start(self) -> _Worker | None:
        try:
            worker = _Worker(self._command, self._log_file)
        except OSError as error:  # no room for its log, or for one more process: tried again at the next look
            log.warning("planning cannot be started: %s", error)
            return None
        self._workers.append(worker)
        return worker


class _Worker:
    """One planning process. Its orders are written, and its answers read, by threads: neither may be waited for."""

    def __init__(self, command: list[str], log_file: Path) -> None:
        self.sent: list[str] = []
        """Jobs that it has, in the order in which it plans them."""
        self._since = 0.0
        """When it began with the first of them."""
        self._orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("a") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()
        threading.Thread(target=self._write, args=(self.process.stdin,), daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the process is gone, and all that it has said was read."""
        return self.process.poll() is not None and self._lines.empty()

    def slow(self, now: float) -> bool:
        """Whether it has been busy with one order for long."""
        return bool(self.sent) and now - self._since >= _SLOW_S

    def send(self, job: str, line: str, now: float) -> None:
        """One more order; returns at once."""
        if not self.sent:
            self._since = now
        self.sent.append(job)
        self._orders.put(line + "\n")

    def forget(self, job: str, now: float) -> None:
        """The job has its answer."""
        if self.sent[:1] == [job]:
            self._since = now
        self.sent = [other for other in self.sent if other != job]

    def answers(self) -> list[dict[str, Any]]:
        """What it has answered since the last time."""
        found: list[dict[str, Any]] = []
        while not self._lines.empty():
            line = self._lines.get()
            try:
                found.append(json.loads(line))
            except ValueError:  # it died in the middle of a line
                log.warning("a planning process left half an answer: %.100s", line)
        return found

    def end(self) -> int:
        """End the process; its exit code."""
        self._orders.put(None)
        self.process.kill()
        return self.process.wait()

    def _write(self, stream: IO[str]) -> None:
        try:
            while (line := self._orders.get()) is not None:
                stream.write(line)
                stream.flush()
        except (BrokenPipeError, ValueError):
            log.warning("a planning process has ended; its orders are sent again")

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
