"""Two things at once: one in a process that is forked for it, the other here.

Python imports one module at a time, however many threads there are, and what measures a model takes seconds to import
and then a good part of one to be taken down.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Found = TypeVar("Found")


def beside(work: Callable[[], Found], here: Callable[[], object], *, first: Callable[[], object]) -> Found:
    """What ``work`` returns, or raises, in a forked process, while this one does ``here``.

    The forked one does ``first`` before it, and pickles what it comes to. Where none can be forked, or it dies without
    a word, ``work`` is done here, without either.
    """
    if not may_fork():
        return work()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _answer(work, first, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as answers:
            here()
            answer = answers.read()
    finally:
        os.kill(child, signal.SIGKILL)  # one that has answered has nothing left to do
        os.waitpid(child, 0)
    try:
        found, error = pickle.loads(answer)  # noqa: S301  from a process of ours, by a pipe that nobody else has
    except (EOFError, pickle.UnpicklingError):  # nothing, or half of it
        return work()
    if error is not None:
        raise error
    return found  # type: ignore[no-any-return]


def may_fork() -> bool:
    """Whether a forked process would be whole, which it is not where a thread may hold a lock, and any quicker."""
    try:
        threads = sum(1 for _ in Path("/proc/self/task").iterdir())  # those of libraries too
    except OSError:  # no Linux
        return False
    return threads == 1 and len(os.sched_getaffinity(0)) > 1


def _answer(work: Callable[[], Any], first: Callable[[], object], writing: int) -> NoReturn:
    """Do it, say what it came to, and leave at once: all that there is to tidy up is that of the process before."""
    try:
        gc.disable()  # it ends soon
        first()
        with os.fdopen(writing, "wb") as answers:
            answers.write(pickle.dumps(_outcome(work)))
    finally:  # what cannot be said the process before finds out by itself
        os._exit(0)


def _outcome(work: Callable[[], Found]) -> tuple[Found | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # raised where it is waited for
        return None, error
