"""Two things at once: one in a process that is forked for it, the other here.

Python imports one module at a time, however many threads there are, and what measures a model takes seconds to import
and then a good part of one to be taken down.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ..jobs.errors import LazytrainError, error_of

log = logging.getLogger(__name__)


def beside(work: Callable[[], str], here: Callable[[], object], *, first: Callable[[], object]) -> str:
    """The text that ``work`` returns in a forked process, while this one does ``here``.

    The forked one does ``first`` before it. What it raises for people is raised here. Where none can be forked, or it
    misses a module or an attribute, or ends in any other way, ``work`` is done here, without either.
    """
    if not may_fork():
        return work()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _answer(work, first, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, encoding="utf-8") as answers:
            here()
            answer = answers.read()
    finally:
        os.kill(child, signal.SIGKILL)  # one that has answered has nothing left to do
        os.waitpid(child, 0)
    try:
        found: dict[str, str] = json.loads(answer)
    except ValueError:  # nothing, or half of it
        log.info("the process beside this one gave no answer: what it was asked is done again here")
        return work()
    if "text" not in found:
        raise error_of(**found)
    return found["text"]


def may_fork() -> bool:
    """Whether a forked process would be whole, which it is not where a thread may hold a lock, and any quicker."""
    try:
        threads = sum(1 for _ in Path("/proc/self/task").iterdir())  # those of libraries too
    except OSError:  # no Linux
        return False
    return threads == 1 and len(os.sched_getaffinity(0)) > 1


def _answer(work: Callable[[], str], first: Callable[[], object], writing: int) -> NoReturn:
    """Do it, say what it came to, and leave at once: all that there is to tidy up is that of the process before."""
    try:
        gc.disable()  # it ends soon
        first()
        with os.fdopen(writing, "w", encoding="utf-8") as answers:
            answers.write(_outcome(work))
    finally:  # what was not said the process before finds out by itself
        os._exit(0)


def _outcome(work: Callable[[], str]) -> str:
    try:
        return json.dumps({"text": work()})
    except LazytrainError as error:
        return "" if _misses_something(error) else json.dumps(error.to_dict())


def _misses_something(error: BaseException | None) -> bool:
    """Whether it began with what ``first`` may have taken away."""
    while error is not None and not isinstance(error, (ImportError, AttributeError)):
        error = error.__cause__ or error.__context__
    return error is not None
