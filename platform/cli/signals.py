"""Asking a run to stop instead of tearing it down."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether SIGINT or SIGTERM has come."""

    def __init__(self) -> None:
        self.number = 0

    def requested(self) -> bool:
        """Asked by the training loop after every step."""
        return self.number != 0


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """The first SIGINT or SIGTERM is a request, the second is KeyboardInterrupt."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.requested():
            raise KeyboardInterrupt
        request.number = number

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
