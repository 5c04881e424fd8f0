"""Pausing a run: its process stays, with everything in host memory and nothing on the device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import OutOfMemory
from ..executor import Streamed
from .stopping import StopRequested

log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Pause:
    """How a run is asked to pause, between two steps."""

    asked: Callable[[], bool] = lambda: False
    """Whether it shall be paused now."""
    told: Callable[[bool], None] = lambda paused: None
    """Hears True once the device's memory is given back, and False once it is taken again."""


def pause_while_asked(streamed: Streamed, pause: Pause, stop: Callable[[], bool]) -> None:
    """Give the device's memory back for as long as it is asked for.

    Raises StopRequested when the run is to stop meanwhile, or when the device has no room for it any more: its state
    is then saved from host memory, and it can go on elsewhere.
    """
    if not pause.asked():
        return
    streamed.release_device()
    pause.told(True)
    while pause.asked():
        if stop():
            raise StopRequested
        time.sleep(_LOOK_EVERY_S)
    try:
        streamed.take_device()
    except OutOfMemory as error:
        log.warning("the device has no room any more after the pause: %s", error.message)
        raise StopRequested from error
    pause.told(False)
