"""A blocking call of Ray's in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs ``work`` while the caller's thread stays free to follow it and to hear Ctrl-C.

    Ray Train and Ray Tune replace the SIGINT handler when they are called from the main thread; from here they do not.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._value: T
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def follow(self, look: Callable[[], None], *, every_s: float, stop: Callable[[], None], patience_s: float) -> T:
        """The call's value, with ``look`` called now and then until it is there; raises what the call raised.

        When ``look`` raises or the process is interrupted, ``stop`` is called and the call gets ``patience_s`` to end.
        """
        try:
            while not self._done.wait(every_s):
                look()
            look()
        except BaseException:
            stop()
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C ends the patience
                self._done.wait(patience_s)
            raise
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:  # raised again in the thread that follows
            self._error = error
        finally:
            self._done.set()
