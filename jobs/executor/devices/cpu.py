"""The CPU as a device (`Cpu`: everything in line), and as a stand-in for a GPU (`EmulatedDevice`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from ...errors import OutOfMemory
from ...memory import AliveBytes, StorageTracker, unseen
from .base import LEAVING, Device, Event, InlineStream, Stream, ThreadStream
from .host import MORE_HOST_MEMORY, page_aligned

STREAM_NAMES = ("h2d", "d2h", "nvme_read", "nvme_write", "cpu")


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """A GPU to emulate on the CPU: its memory in bytes, its links in bytes per second (None: as fast as it goes)."""

    memory_bytes: int
    h2d_bytes_s: float | None = None
    d2h_bytes_s: float | None = None
    nvme_read_bytes_s: float | None = None
    nvme_write_bytes_s: float | None = None
    host_memory_bytes: int | None = None
    """What the links reach of the host's memory may be so large (None: as large as it gets)."""


class CpuDevice(Device):
    """Plain CPU memory without a budget; transfers happen in line. Simple and deterministic.

    Counting memory costs 4 to 10 % of a step, so it begins when somebody first asks for the peak.
    """

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self._tracker, self._counts = StorageTracker(), False
        self.streams: dict[str, Stream] = {name: InlineStream(name, self.recorder) for name in STREAM_NAMES}

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with unseen():
            tensor = torch.empty(numel, dtype=dtype)
        self._tracker.watch(tensor)
        return tensor

    def host_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with _disable_current_modes():  # host memory is not the device's
            return page_aligned(numel * dtype.itemsize).view(dtype)

    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """In one call: between two, a link's thread would take the interpreter from the thread that computes."""
        if targets:
            torch._foreach_copy_(targets, sources)

    def counting(self) -> AbstractContextManager[object]:
        if not self._counts or self._tracker in _get_current_dispatch_mode_stack():
            return nullcontext()
        return self._tracker

    def compute_waits(self, event: Event) -> None:
        event.wait()

    def compute_event(self) -> Event:
        return Event.ended()

    def lend(self, tensor: torch.Tensor, stream: str) -> None:
        pass  # whoever uses a tensor holds a reference to it

    @property
    def peak_bytes(self) -> int:
        self._counts = True
        return self._tracker.peak_bytes

    def reset_peak(self) -> None:
        self._counts = True
        self._tracker.reset_peak()


class EmulatedDevice(CpuDevice):
    """The CPU with a GPU's memory budget and with links as threads, throttled to its bandwidths.

    It runs the same engine as a real GPU, so overlap, peaks and out-of-memory can be seen on any machine; results are
    bit-equal to plain CPU execution.
    """

    def __init__(self, gpu: Emulated) -> None:
        super().__init__()
        self._tracker, self._counts = StorageTracker(gpu.memory_bytes), True
        self._host = HostBudget(gpu.host_memory_bytes)
        threads = torch.get_num_threads()
        rates = {
            "h2d": gpu.h2d_bytes_s,
            "d2h": gpu.d2h_bytes_s,
            "nvme_read": gpu.nvme_read_bytes_s,
            "nvme_write": gpu.nvme_write_bytes_s,
            "cpu": None,
        }
        self.links = {name: ThreadStream(name, self.recorder, rate) for name, rate in rates.items()}
        self.streams = {**self.links}
        for stream in self.links.values():  # each has started and taken one thread ...
            stream.submit("start", lambda: None, ()).wait()
        torch.set_num_threads(threads)  # ... which some BLAS libraries apply to the whole process

    def compute_waits(self, event: Event) -> None:
        event.wait()
        event.settle()

    def lend(self, tensor: torch.Tensor, stream: str) -> None:
        if stream in LEAVING:  # a target on the device is not freed before compute has waited for its copy
            self.links[stream].lent.hold(tensor)

    def host_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._host.check(numel * dtype.itemsize)
        tensor = super().host_empty(numel, dtype)
        self._host.count(tensor)
        return tensor

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        self._host.check(tensor.nbytes)
        self._host.count(tensor)
        return tensor


class HostBudget:
    """Counts host memory until it is freed."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes, self._alive = budget_bytes, AliveBytes()

    def check(self, nbytes: int) -> None:
        """Raise OutOfMemory if there is no room for so much more."""
        used = self._alive.bytes
        if self.budget_bytes is not None and used + nbytes > self.budget_bytes:
            raise OutOfMemory(
                tier="host", requested_bytes=nbytes, used_bytes=used, budget_bytes=self.budget_bytes,
                hint=MORE_HOST_MEMORY,
            )  # fmt: skip

    def count(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage as long as anybody holds it."""
        self._alive.add(tensor.untyped_storage())
