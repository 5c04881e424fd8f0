"""What the executor uses of ``kvikio`` 26.10, on the memory of an emulated device.

As on a GPU, a request is carried out by its stream some time after it was made, and nothing is known of it before
`IOFutureStream.check_bytes_done`, which waits for the stream. A future that nobody asks waits when it is dropped, and
only prints what went wrong.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from types import ModuleType

BLOCK = 4096


class CompatMode(Enum):
    OFF = 0
    ON = 1
    AUTO = 2


class IOFutureStream:
    def __init__(self, done: Future[int]) -> None:
        self._done = done

    def check_bytes_done(self) -> int:
        return self._done.result()

    def __del__(self) -> None:
        if (error := self._done.exception()) is not None:
            print(error, file=sys.stderr)


class Driver:
    """One installation of it: what tests change, and what they look at."""

    def __init__(self) -> None:
        self.gds_available, self.compat_preferred, self.compat_mode = True, False, CompatMode.AUTO
        self.open_files = 0
        self.requests: list[tuple[str, int, int]] = []
        """Direction, offset and bytes of each."""
        self.used: set[tuple[str, int]] = set()
        """Directions, with the stream that each was given."""
        self.fails: dict[str, list[BaseException | int]] = {"write": [], "read": []}
        """For the next requests of a direction: what is raised, or how many bytes are moved at most."""
        self._streams: dict[int, ThreadPoolExecutor] = {}
        self._delays = random.Random(0)
        self._lock = threading.Lock()

    def submit(self, stream: int, way: str, work, size: int, offset: int) -> IOFutureStream:
        with self._lock:
            if stream not in self._streams:
                self._streams[stream] = ThreadPoolExecutor(1, thread_name_prefix="fake-gpu")
            self.requests.append((way, offset, size))
            self.used.add((way, stream))
            delay, fault = self._delays.choice((0, 0, 0.0005)), self.fails[way].pop(0) if self.fails[way] else size

        def late() -> int:
            time.sleep(delay)
            if isinstance(fault, BaseException):
                raise fault
            return work(min(size, fault))

        return IOFutureStream(self._streams[stream].submit(late))

    def close(self) -> None:
        for stream in self._streams.values():
            stream.shutdown()

    def modules(self) -> dict[str, ModuleType]:
        """What ``import kvikio`` is to find."""
        driver = self

        class CuFile:
            def __init__(self, file, flags="r"):
                if flags != "r+" or driver.compat_mode is not CompatMode.OFF:
                    raise RuntimeError("the executor opens files to read and write, without a fallback")
                self._fd = os.open(file, os.O_RDWR)
                driver.open_files += 1

            def close(self):
                os.close(self._fd)
                driver.open_files -= 1

            def raw_write_async(self, buf, raw_stream, size=None, file_offset=0, dev_offset=0):
                view = _bytes(buf, size, dev_offset)
                return driver.submit(
                    raw_stream, "write", lambda n: os.pwrite(self._fd, view[:n], file_offset), len(view), file_offset
                )

            def raw_read_async(self, buf, raw_stream, size=None, file_offset=0, dev_offset=0):
                view = _bytes(buf, size, dev_offset)
                return driver.submit(
                    raw_stream, "read", lambda n: os.preadv(self._fd, [view[:n]], file_offset), len(view), file_offset
                )

        @contextmanager
        def changed(key, value):
            before, driver.compat_mode = driver.compat_mode, value
            yield
            driver.compat_mode = before

        kvikio, defaults, cufile_driver = (ModuleType(f"kvikio{n}") for n in ("", ".defaults", ".cufile_driver"))
        kvikio.CuFile, kvikio.CompatMode = CuFile, CompatMode
        defaults.set, defaults.is_compat_mode_preferred = changed, lambda: driver.compat_preferred
        cufile_driver.get = lambda name: {"is_gds_available": driver.gds_available, "allow_compat_mode": True}[name]
        kvikio.defaults, kvikio.cufile_driver = defaults, cufile_driver
        return {module.__name__: module for module in (kvikio, defaults, cufile_driver)}


def _bytes(buf, size, dev_offset) -> memoryview:
    view = memoryview(buf.numpy()).cast("B")[dev_offset:]
    if size is not None and size > len(view):
        raise ValueError("Size is greater than the size of the buffer")
    return view[:size]
