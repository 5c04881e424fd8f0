"""What a device is to the engine: streams that run work in order, events that mark its end, and counted memory."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...timeline import Span

Work = Callable[[], None]
LEAVING = ("d2h", "nvme_write")
"""Streams that read device memory, the second where boundaries go to NVMe directly."""


class Event:
    """Marks the end of one piece of work. Waiting for it raises what the work raised."""

    def __init__(self, lent: Lent | None = None, number: int = 0) -> None:
        """``number`` is that of the work in what its stream was lent."""
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lent, self._number = lent, number

    def wait(self) -> None:
        """Block the calling thread until the work has ended."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """What the work read, and what all work that it had waited for read, may be freed: the program has come to a
        wait for its end."""
        if self._lent is not None:
            self._lent.release(self._number)

    @property
    def has_ended(self) -> bool:
        """Whether a wait for it would return, or raise, at once."""
        return self._ended.is_set()

    def raise_failure(self) -> None:
        """Raise what the work has raised so far; do not wait for it."""
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException | None = None) -> None:
        """Declare the work ended, well or with an error."""
        self._error = error
        self._ended.set()

    @classmethod
    def ended(cls, error: BaseException | None = None) -> Event:
        """An event of work that is already done, or has failed."""
        event = cls()
        event.end(error)
        return event


class Lent:
    """Device memory that the copies of one stream read, held until compute, or the host, waits for their end.

    So memory is free when the program says so, whatever the speed of the link. It is not free when a copy has ended:
    on a GPU the host is far ahead of it and does not know.
    """

    def __init__(self) -> None:
        self._count = 0
        self._arriving: list[torch.Tensor] = []
        self._held: deque[tuple[int, list[torch.Tensor], Sequence[Event]]] = deque()
        self._lock = threading.Lock()

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` until the end of the work that is submitted next has been waited for."""
        self._arriving.append(tensor)

    def submitted(self, after: Sequence[Event]) -> int:
        """The number of a piece of work that waits for others."""
        self._count += 1
        with self._lock:
            self._held.append((self._count, self._arriving, after))
        self._arriving = []
        return self._count

    def release(self, number: int | None = None) -> None:
        """Let go of what work up to ``number`` reads (None: all), and of all that it had waited for."""
        gone = []
        with self._lock:
            while self._held and (number is None or self._held[0][0] <= number):
                gone.append(self._held.popleft())
        for _, _, before in gone:  # outside the lock, because freeing and settling run code of others
            for event in before:
                event.settle()


class Recorder:
    """Collects the spans of a step from all streams while it is switched on.

    What an operation costs is a look at the clock and a tuple; spans are made when somebody asks for them.
    """

    def __init__(self) -> None:
        self.on = False
        self._ran: list[tuple[str, str, float, float, int]] = []
        self._zero = 0.0

    def start(self) -> None:
        """Begin a new step at time zero."""
        self._ran, self._zero = [], time.perf_counter()

    def add(self, op: str, stream: str, start: float, nbytes: int) -> None:
        """Record an operation that began at perf_counter time ``start`` and ends now."""
        if self.on:
            self._ran.append((op, stream, start, time.perf_counter(), nbytes))

    def result(self) -> list[Span]:
        """What was recorded since `start`."""
        ran, zero = list(self._ran), self._zero
        return [Span(op, stream, start - zero, end - zero, nbytes) for op, stream, start, end, nbytes in ran]


class Stream(ABC):
    """Runs pieces of work one after the other, in the order in which they were given."""

    @abstractmethod
    def submit(self, name: str, work: Work, after: Sequence[Event], nbytes: int = 0) -> Event:
        """Run ``work`` once everything in ``after`` has ended; ``nbytes`` is what it moves over the stream's link."""

    @abstractmethod
    def close(self) -> None:
        """Stop taking work; return when what was given has ended."""


class InlineStream(Stream):
    """Runs each piece of work at once, in the caller's thread."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self._recorder = name, recorder

    def submit(self, name: str, work: Work, after: Sequence[Event], nbytes: int = 0) -> Event:
        for event in after:
            event.wait()
        start = time.perf_counter()
        work()
        self._recorder.add(name, self.name, start, nbytes)
        return Event.ended()

    def close(self) -> None:
        pass  # nothing is ever waiting


Queue = queue.SimpleQueue[tuple[str, Work, Sequence[Event], int, Event] | None]
"""What a stream was given; None ends it."""


class ThreadStream(Stream):
    """Runs work on a thread of its own, no faster than ``bytes_per_s`` (None: as fast as it goes)."""

    def __init__(self, name: str, recorder: Recorder, bytes_per_s: float | None = None) -> None:
        self.name, self.bytes_per_s, self._recorder = name, bytes_per_s, recorder
        self.lent = Lent()
        self._queue: Queue = queue.SimpleQueue()
        served = (weakref.ref(self), self._queue)
        thread = threading.Thread(target=_serve, args=served, name=f"lazytrain-{name}", daemon=True)
        thread.start()
        # At the interpreter's end too: a thread that is still alive then would abort the process.
        self._end = weakref.finalize(self, _end, self._queue, thread)

    def submit(self, name: str, work: Work, after: Sequence[Event], nbytes: int = 0) -> Event:
        before = tuple(after)
        event = Event(self.lent, self.lent.submitted(before))
        self._queue.put((name, work, before, nbytes, event))
        return event

    def feed(self, name: str, work: Work) -> None:
        """Run ``work`` in its turn; nobody waits for it."""
        self._queue.put((name, work, (), 0, Event()))

    def close(self) -> None:
        self._end()
        self.lent.release()

    def _do(self, name: str, work: Work, nbytes: int) -> None:
        start = time.perf_counter()
        work()
        if self.bytes_per_s is not None:
            left = start + nbytes / self.bytes_per_s - time.perf_counter()
            if left > 0:
                time.sleep(left)  # the link is busy for as long as a real one of this bandwidth
        self._recorder.add(name, self.name, start, nbytes)


def _serve(stream: weakref.ref[ThreadStream], given: Queue) -> None:
    """What the thread of a stream does; it does not keep the stream, so that one which nobody has any more ends."""
    torch.set_num_threads(1)  # the cores belong to the compute thread
    while (item := given.get()) is not None:
        name, work, after, nbytes, event = item
        failure: BaseException | None = None
        try:
            for earlier in after:
                earlier.wait()
            if (here := stream()) is None:
                raise RuntimeError(f"{name} was given to a stream that was dropped without close()")
            here._do(name, work, nbytes)
        except BaseException as error:  # raised again where somebody waits for the event
            failure = error
        here = None
        del item, work, after  # they hold tensors, whose memory counts as free once the event has ended
        event.end(failure)


def _end(given: Queue, thread: threading.Thread) -> None:
    given.put(None)
    if thread is not threading.current_thread():  # it may be the last that held the stream
        thread.join()


class Device(ABC):
    """A device that the engine computes on, with the links between it, the host and NVMe."""

    torch_device: torch.device
    streams: Mapping[str, Stream]
    """``h2d``, ``d2h``, ``nvme_read``, ``nvme_write`` and ``cpu``."""
    has_direct_io = False
    """Whether files can be reached from its memory, if GPUDirect Storage is installed."""

    def __init__(self) -> None:
        self.recorder = Recorder()

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised flat device memory. Raises OutOfMemory."""

    @abstractmethod
    def host_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat host memory that the links reach directly; it begins at a page, as direct I/O wants it."""

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A flat host tensor, or a copy of it in memory that the links reach directly."""
        return tensor

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the user's on the device, in the order of the stream that is current; itself if it is there."""
        return tensor.to(self.torch_device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device, in the order of the stream whose work this is part of."""
        target.copy_(source, non_blocking=True)

    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """`copy` each of ``sources`` to the one of ``targets`` at its place."""
        for target, source in zip(targets, sources, strict=True):
            self.copy(target, source)

    @abstractmethod
    def counting(self) -> AbstractContextManager[object]:
        """While entered, what the calling thread allocates counts as device memory, and what it computes is the
        device's compute, whatever thread or stream it is on."""

    @abstractmethod
    def compute_waits(self, event: Event) -> None:
        """Make later compute of the calling thread wait for ``event``."""

    @abstractmethod
    def compute_event(self) -> Event:
        """An event that ends when all compute given so far has ended."""

    def compute_started(self) -> Any:
        """The moment at which an operation of the compute thread begins, for `compute_ended`."""
        return time.perf_counter()

    def compute_ended(self, op: str, started: Any) -> None:
        """Record the span of a compute operation, if spans are recorded."""
        self.recorder.add(op, "compute", started, 0)

    @abstractmethod
    def lend(self, tensor: torch.Tensor, stream: str) -> None:
        """Keep ``tensor`` from being freed before compute, or the host, waits for the copy that ``stream`` is given
        next."""

    def io_stream(self, name: str) -> AbstractContextManager[int]:
        """While entered, the device is current for the calling thread; gives the handle of a stream of the GPU's that
        nothing but the direct I/O of stream ``name`` uses."""
        return nullcontext(0)

    def give_back(self) -> None:
        """Return to the system what was freed and is kept for later, once all copies have ended."""
        return  # plain memory is not kept

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Most device memory in use at once since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start measuring the peak anew."""

    def close(self) -> None:
        """End all streams."""
        for stream in self.streams.values():
            stream.close()
