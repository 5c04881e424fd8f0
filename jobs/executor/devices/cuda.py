"""An NVIDIA GPU: CUDA streams for the links, pinned host memory, the caching allocator's own counters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ...errors import HardwareError
from .base import Device, Event, Recorder, Stream, ThreadStream, Work


class CudaEvent(Event):
    """An event on the GPU. The host waits until it is recorded and reached; a CUDA stream need only wait on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.gpu = torch.cuda.Event()

    def wait(self) -> None:
        super().wait()
        self.gpu.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait for this event without blocking the host longer than until it is recorded."""
        super().wait()
        stream.wait_event(self.gpu)


class CudaStream(Stream):
    """A CUDA stream, fed by a host thread so that it can also wait for work that the CPU does."""

    def __init__(self, name: str, recorder: Recorder, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._feeder = ThreadStream(name, recorder)

    def submit(self, name: str, work: Work, after: Sequence[Event], nbytes: int = 0) -> Event:
        event = CudaEvent()

        def enqueue() -> None:
            for earlier in after:
                if isinstance(earlier, CudaEvent):
                    earlier.hold(self.stream)
                else:
                    earlier.wait()
            with torch.cuda.stream(self.stream):
                work()
            event.gpu.record(self.stream)

        def run() -> None:
            try:
                enqueue()
            except BaseException as error:
                event.end(error)
                raise
            event.end()

        self._feeder.submit(name, run, (), nbytes)
        return event

    def close(self) -> None:
        self._feeder.close()
        self.stream.synchronize()


class CudaDevice(Device):
    """One GPU; ``memory_bytes`` caps what this process may take of it."""

    def __init__(self, index: int = 0, memory_bytes: int | None = None) -> None:
        super().__init__()
        if not torch.cuda.is_available():
            raise HardwareError("no CUDA device is visible", hint="use --device cpu or --device emulated:RTX3090")
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        if memory_bytes is not None:
            total = torch.cuda.get_device_properties(index).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total), index)
        self._copies = {name: CudaStream(name, self.recorder, self.torch_device) for name in ("h2d", "d2h")}
        self.streams = {
            **self._copies,
            "nvme_read": ThreadStream("nvme_read", self.recorder),
            "nvme_write": ThreadStream("nvme_write", self.recorder),
            "cpu": ThreadStream("cpu", self.recorder),
        }

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.torch_device)

    def host_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def counting(self) -> AbstractContextManager[object]:
        return nullcontext()

    def compute_waits(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            event.hold(torch.cuda.current_stream(self.torch_device))
        else:
            event.wait()

    def compute_event(self) -> Event:
        event = CudaEvent()
        event.gpu.record(torch.cuda.current_stream(self.torch_device))
        event.end()
        return event

    def lend(self, tensor: torch.Tensor, stream: str) -> None:
        tensor.record_stream(self._copies[stream].stream)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)
