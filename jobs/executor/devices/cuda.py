"""An NVIDIA GPU: CUDA streams for the links, pinned host memory, the caching allocator's own counters.

Memory is safe without ``record_stream``, which would keep freed blocks from reuse until the *host* sees the copy's end,
and the host runs far ahead of the GPU:

- all device memory is allocated while the compute stream is current (every tick enters it), so a freed block is given
  again to later work of that stream;
- a copy to the device starts after an event of the compute stream that was recorded after its target was allocated, and
  compute waits for the copy before it uses, and so before it frees, the target;
- what a copy from the device reads is held here until compute (or the host) has waited for that copy.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from ...errors import HardwareError
from ...timeline import Span
from .base import LEAVING, Device, Event, Lent, Recorder, Stream, ThreadStream, Work
from .cores import stay_on
from .host import numa_node_of
from .pinned import PinnedMemory, SlabRing, make_ring

_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every context of the process."""


class CudaEvent(Event):
    """An event on the GPU. The host waits until it is recorded and reached; a CUDA stream need only wait on the GPU."""

    def __init__(self, lent: Lent | None = None, number: int = 0) -> None:
        super().__init__(lent, number)
        self.gpu = torch.cuda.Event(blocking=True)  # a waiting thread sleeps: the cores belong to the optimizer

    def wait(self) -> None:
        super().wait()
        self.gpu.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait for this event without blocking the host longer than until it is recorded."""
        super().wait()
        stream.wait_event(self.gpu)


class CudaStream(Stream):
    """A CUDA stream, fed by a host thread so that it can also wait for work that the CPU does."""

    def __init__(self, name: str, recorder: CudaRecorder, device: torch.device) -> None:
        self.name, self._recorder = name, recorder
        self.stream, self.lent = torch.cuda.Stream(device), Lent()
        self._feeder = ThreadStream(name, Recorder())  # spans are those of the GPU, not of its feeder

    def submit(self, name: str, work: Work, after: Sequence[Event], nbytes: int = 0) -> Event:
        before = tuple(after)
        event = CudaEvent(self.lent, self.lent.submitted(before))
        given = [(work, before)]

        def run() -> None:
            try:
                self._enqueue(name, *given.pop(), nbytes, event)  # nothing here keeps the work's tensors after this
            except BaseException as error:
                event.end(error)
                raise
            event.end()

        self._feeder.feed(name, run)
        return event

    def _enqueue(self, name: str, work: Work, after: tuple[Event, ...], nbytes: int, event: CudaEvent) -> None:
        for earlier in after:
            if isinstance(earlier, CudaEvent):
                earlier.hold(self.stream)
            else:
                earlier.wait()
        with torch.cuda.stream(self.stream):
            started = self._recorder.mark(self.stream)
            work()
            event.gpu.record(self.stream)
            self._recorder.add_between(name, self.name, started, self.stream, nbytes)

    def close(self) -> None:
        self._feeder.close()
        self.stream.synchronize()
        self.lent.release()


class CudaRecorder(Recorder):
    """Spans of the GPU's streams between events that the GPU itself times; those of host threads by the clock."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._timed: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event, int]] = []
        self._spare: list[torch.cuda.Event] = []  # of steps before: to make one takes longer than to record it
        self._first: torch.cuda.Event | None = None

    def start(self) -> None:
        """Begin a new step at time zero, on the GPU and on the host."""
        torch.cuda.synchronize(self._device)
        timed, self._timed = self._timed, []
        self._spare += [event for _, _, *both, _ in timed for event in both]
        self._first = torch.cuda.Event(enable_timing=True)
        self._first.record(torch.cuda.current_stream(self._device))
        self._first.synchronize()
        super().start()

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event | None:
        """The moment at which ``stream`` comes to this point; None while nothing is recorded."""
        if not self.on:
            return None
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def add_between(
        self, op: str, name: str, start: torch.cuda.Event | None, stream: torch.cuda.Stream, nbytes: int
    ) -> None:
        """Record an operation that began at ``start`` and ends where ``stream`` is now."""
        end = self.mark(stream)
        if start is not None and end is not None:
            self._timed.append((op, name, start, end, nbytes))

    def result(self) -> list[Span]:
        torch.cuda.synchronize(self._device)
        first = self._first
        if first is None:
            return super().result()
        timed = [
            Span(op, stream, first.elapsed_time(start) / 1e3, first.elapsed_time(end) / 1e3, nbytes)
            for op, stream, start, end, nbytes in self._timed
        ]
        return [*super().result(), *timed]


class CudaDriver:
    """CUDA's host memory calls; numbers that are not 0 are its errors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        return int(torch.cuda.cudart().cudaHostUnregister(address))

    def settle(self) -> None:
        """Wait for all copies, and clear the error of a refused registration: the next launch would report it."""
        torch.cuda.synchronize(self._device)
        try:
            torch.zeros(1, device=self._device).add_(1)
        except RuntimeError:
            return  # that error; reporting it has cleared it


class CudaDevice(Device):
    """One GPU; ``memory_bytes`` caps what torch's allocator may take of it.

    Compute runs on the stream that is current when the device is opened, whatever stream the caller or autograd's
    backward thread is on later.
    """

    recorder: CudaRecorder
    has_direct_io = True

    def __init__(
        self, index: int = 0, memory_bytes: int | None = None, *, pinned_limit_bytes: int | None = None
    ) -> None:
        super().__init__()
        if not torch.cuda.is_available():
            raise HardwareError("no CUDA device is visible", hint="use --device cpu or --device emulated:RTX3090")
        prefer_expandable_segments()
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        if memory_bytes is not None:
            self._cap(memory_bytes)
        node = numa_node_of(pci_address(index))
        stay_on(node)
        self.recorder = CudaRecorder(self.torch_device)
        self._compute = torch.cuda.current_stream(self.torch_device)
        self._copies = {name: CudaStream(name, self.recorder, self.torch_device) for name in ("h2d", "d2h")}
        threads = {name: ThreadStream(name, self.recorder) for name in ("nvme_read", "nvme_write", "cpu")}
        self.streams = {**self._copies, **threads}
        self._lent = {"d2h": self._copies["d2h"].lent, "nvme_write": threads["nvme_write"].lent}
        self._io: dict[str, torch.cuda.Stream] = {}
        self._memory = PinnedMemory(CudaDriver(self.torch_device), node=node, limit_bytes=pinned_limit_bytes)
        self._rings: dict[bool, SlabRing | None] = {}  # by whether it copies to the device

    def _cap(self, memory_bytes: int) -> None:
        """The context and other processes have their memory already: what is free is all that the allocator may get."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        torch.cuda.set_per_process_memory_fraction(min(memory_bytes, free) / total, self.torch_device)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.torch_device)

    def host_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._memory.allocate(numel * dtype.itemsize).view(dtype)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.host_empty(tensor.numel(), tensor.dtype).copy_(tensor)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """By way of pinned memory, else the host would wait for all that the stream was given before."""
        if tensor.device == self.torch_device:
            return tensor
        staged = tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
        return staged.to(self.torch_device, non_blocking=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """What is not pinned passes through slabs, and so does what changes its dtype, which would take GPU memory."""
        to_device = target.is_cuda
        host = source if to_device else target
        staged = target.dtype != source.dtype or not self._memory.is_pinned(host)
        ring = self._ring(to_device) if staged and target.is_contiguous() else None
        if ring is None:
            target.copy_(source, non_blocking=True)
        elif to_device:
            ring.to_device(target, source)
        else:
            ring.to_host(target, source)

    def _ring(self, to_device: bool) -> SlabRing | None:
        if to_device not in self._rings:
            self._rings[to_device] = make_ring(self._memory, _copy, lambda: torch.cuda.Event(blocking=True))
        return self._rings[to_device]

    def counting(self) -> AbstractContextManager[object]:
        return self._on_compute_stream()

    @contextmanager
    def _on_compute_stream(self) -> Iterator[None]:
        """Make this device and its compute stream current, in step with the stream that the caller is on."""
        with torch.cuda.device(self.torch_device):
            callers = torch.cuda.current_stream(self.torch_device)
            if callers == self._compute:
                yield
                return
            self._compute.wait_stream(callers)
            try:
                with torch.cuda.stream(self._compute):
                    yield
            finally:
                callers.wait_stream(self._compute)

    def compute_waits(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            event.hold(self._compute)
        else:
            event.wait()
        event.settle()

    def compute_event(self) -> Event:
        event = CudaEvent()
        event.gpu.record(self._compute)
        event.end()
        return event

    def compute_started(self) -> torch.cuda.Event | None:
        return self.recorder.mark(self._compute)

    def compute_ended(self, op: str, started: torch.cuda.Event | None) -> None:
        self.recorder.add_between(op, "compute", started, self._compute, 0)

    def lend(self, tensor: torch.Tensor, stream: str) -> None:
        if stream in LEAVING:  # a target on the device is not freed before compute has waited for its copy
            self._lent[stream].hold(tensor)

    @contextmanager
    def io_stream(self, name: str) -> Iterator[int]:
        with torch.cuda.device(self.torch_device):
            if name not in self._io:
                self._io[name] = torch.cuda.Stream(self.torch_device)
            yield self._io[name].cuda_stream

    def give_back(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def close(self) -> None:
        super().close()
        self._rings.clear()
        self._memory.close()


def prefer_expandable_segments() -> None:
    """Let the allocator grow its segments, so that layers of different sizes do not fragment them.

    Only before CUDA's first use, and not against settings of the user's own.
    """
    if not torch.cuda.is_initialized() and not any(os.environ.get(name) for name in _ALLOCATOR_SETTINGS):
        os.environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def pci_address(index: int) -> str:
    """The PCI address of a visible GPU, as sysfs has it; empty where the driver does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    device, text = ctypes.c_int(), ctypes.create_string_buffer(32)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return ""
    failed = driver.cuDeviceGetPCIBusId(text, len(text), device)
    return "" if failed else text.value.decode("ascii").lower()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
