"""Planning in a process of its own: it brings torch and takes seconds, and the controller has to go on meanwhile.

Orders and answers are lines of JSON on its standard input and output; when the controller dies, the input is closed and
the process ends.
"""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import IO

from ...jobs.errors import LazytrainError, error_of
from .values import Admission, AdmissionOrder, Answer, Found, Question

log = logging.getLogger(__name__)

_MODULE = "lazytrain.platform.admission.process"
_AHEAD = 2
"""Orders that the process has at once: one that it plans, one so that it is not idle; an urgent one waits for both."""


class PlannerProcess:
    """Implements `values.Planner`. The process is started when there is something to plan, and again if it dies.

    Orders of higher priority go first, and then older ones.
    """

    def __init__(self, log_file: Path, module: str = _MODULE, *, niceness: int = 0) -> None:
        """``niceness`` is how far the process stands back behind others, as ``nice -n`` has it."""
        self._log_file = log_file
        self._command = [*(["nice", "-n", str(niceness)] if niceness else []), sys.executable, "-m", module]
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting: dict[str, AdmissionOrder | Question] = {}
        self._sent: list[str] = []
        """Jobs among them that the process has, in the order in which it plans them."""
        self._found: dict[str, Found] = {}

    def submit(self, order: AdmissionOrder | Question) -> None:
        """Take the order, unless the process has it already."""
        if order.job not in self._sent:
            self._waiting[order.job] = order
            self._feed()

    def results(self) -> dict[str, Found]:
        """Answers that have come in; when the process died, its oldest order is given up and the rest sent again."""
        while not self._lines.empty():
            self._take(self._lines.get())
        if self._process is not None and self._process.poll() is not None and self._lines.empty():
            self._bury(self._process.returncode)
        self._feed()
        found, self._found = self._found, {}
        return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _take(self, line: str) -> None:
        answer = json.loads(line)
        if self._waiting.pop(answer["job"], None) is None:
            return
        self._sent = [job for job in self._sent if job != answer["job"]]
        if "error" in answer:
            self._found[answer["job"]] = error_of(**answer["error"])
        elif "values" in answer:
            self._found[answer["job"]] = Answer(values=answer["values"])
        else:
            self._found[answer["job"]] = Admission.model_validate(answer["admission"])

    def _bury(self, code: int) -> None:
        """The order that it died of is the oldest one; whoever sent it will hear of it."""
        log.warning("the planning process ended with %d", code)
        self._process = None
        if self._sent:
            job = self._sent[0]
            del self._waiting[job]
            self._found[job] = LazytrainError(
                f"the planning process died ({code}) while it planned this job",
                hint=f"its log is {self._log_file}; the host may have too little memory",
            )
        self._sent = []

    def _feed(self) -> None:
        """Let the process have the next orders."""
        room = _AHEAD - len(self._sent)
        if room <= 0:
            return
        rest = [order for order in self._waiting.values() if order.job not in self._sent]
        rest.sort(key=lambda order: -order.priority)  # the sort keeps the older ones first
        for order in rest[:room]:
            self._sent.append(order.job)
            self._send(order)

    def _send(self, order: AdmissionOrder | Question) -> None:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(asdict(order)) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            log.warning("the planning process has ended; its orders are sent again")

    def _start(self) -> subprocess.Popen[str]:
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("a") as log_file:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
            )
        assert process.stdout is not None
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()
        self._process = process
        return process

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
