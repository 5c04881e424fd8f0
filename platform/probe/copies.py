"""How fast one GPU copies while others of its node may do the same: from before all have begun until all are done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

import torch

from ...schedulers.hardware import HardwareProfile

Way = Literal["h2d", "d2h"]
WAYS: Final[tuple[Way, ...]] = ("h2d", "d2h")
_PARTS: Final = 4
_LEAST_COPIES: Final = 4
"""Copies that are counted at least, however long they take."""
_SIZES: Final = {"cuda": 256 << 20, "cpu": 64 << 20}
"""Bytes of each direction's buffers: far more than caches hold. They are copied in parts, over and over."""


def nobody() -> None:
    """Where a GPU that copies alone meets."""


class Copier:
    """Copies between the host's memory and a GPU, or what emulates one, in one or both directions at once."""

    def __init__(self, base: HardwareProfile | None = None) -> None:
        """For this process's CUDA device, or, with ``base`` of device ``emulated``, for one with its links."""
        emulated = base is not None and base.device == "emulated"
        self._device = torch.device("cpu") if emulated else torch.device("cuda", torch.cuda.current_device())
        self._links: dict[Way, Callable[[int], None]] = {way: self._link(way) for way in WAYS}
        self.nbytes = _SIZES[self._device.type] // _PARTS
        """Of one copy."""
        self._rates = {"h2d": base.h2d_bytes_s, "d2h": base.d2h_bytes_s} if base is not None and emulated else {}

    def rates(self, ways: Sequence[Way], meet: Callable[[], None] = nobody, *, seconds: float = 0.4) -> list[float]:
        """Bytes per second of each direction in ``ways``, over ``seconds`` in which all of them are copied.

        ``meet`` is called twice and returns when all GPUs have called it: before anything is counted, when the copies
        are under way, and after that, before they end. So each copies for as long as any other counts. What a copy or
        ``meet`` raises is raised here.
        """
        flows = [_Flow(self._one(way)) for way in ways]
        try:
            for flow in flows:
                flow.done(1)
            meet()
            found = _count(flows, self.nbytes, seconds)
            meet()
        finally:
            for flow in flows:
                flow.end()
        return found

    def _one(self, way: Way) -> Callable[[int], None]:
        """Copy the part of this number; as slow as the emulated link, if it is one."""
        copy, rate = self._links[way], self._rates.get(way)
        if rate is None:
            return copy
        takes_s = self.nbytes / rate

        def throttled(number: int) -> None:
            ends = time.perf_counter() + takes_s
            copy(number)
            left = ends - time.perf_counter()
            if left > 0:
                time.sleep(left)  # as in jobs.executor.devices, which needs all of transformers

        return throttled

    def _link(self, way: Way) -> Callable[[int], None]:
        on_gpu = self._device.type == "cuda"
        size = _SIZES[self._device.type]
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu).chunk(_PARTS)
        there = torch.zeros(size, dtype=torch.uint8, device=self._device).chunk(_PARTS)
        source, target = (host, there) if way == "h2d" else (there, host)
        if not on_gpu:
            return lambda number: _copy(target, source, number)
        stream = torch.cuda.Stream(self._device)

        def copy(number: int) -> None:
            with torch.cuda.stream(stream):
                _copy(target, source, number)
            stream.synchronize()

        return copy


def _copy(target: Sequence[torch.Tensor], source: Sequence[torch.Tensor], number: int) -> None:
    target[number % _PARTS].copy_(source[number % _PARTS], non_blocking=True)


class _Flow:
    """One direction: copies without a pause, in a thread of its own, until it is ended."""

    def __init__(self, copy: Callable[[int], None]) -> None:
        self._copy = copy
        self._ends: list[float] = []
        self._error: BaseException | None = None
        self._stop = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    def done(self, count: int, *, since: float = 0.0, until: float = 0.0) -> list[float]:
        """When copies ended after ``since``, once there are so many and it is later than ``until``."""
        with self._changed:
            while self._error is None:
                ends = [end for end in self._ends if end >= since]
                if len(ends) >= count and ends[-1] >= until:
                    return ends
                self._changed.wait()
            raise self._error

    def end(self) -> None:
        """Copy no more."""
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)  # a link is one DMA engine, or one thread that stands for it
        try:
            number = 0
            while not self._stop:
                self._copy(number)
                number += 1
                with self._changed:
                    self._ends.append(time.perf_counter())
                    self._changed.notify()
        except BaseException as error:  # raised again where somebody waits for the copies
            with self._changed:
                self._error = error
                self._changed.notify()


def _count(flows: Sequence[_Flow], nbytes: int, seconds: float) -> list[float]:
    began = time.perf_counter()
    ends = [flow.done(_LEAST_COPIES + 1, since=began, until=began + seconds) for flow in flows]
    return [nbytes * (len(each) - 1) / (each[-1] - each[0]) for each in ends]
