"""What is held on one node and until when, so far as it is known now."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

from .question import Gpu, NodeState, Option, RunningJob


@dataclass(frozen=True, slots=True)
class Room:
    """What is left of a node at one moment."""

    gpus: int
    host_bytes: int
    nvme_bytes: int

    def holds(self, option: Option) -> bool:
        """Whether one more job fits."""
        return self.gpus > 0 and option.host_bytes <= self.host_bytes and option.nvme_bytes <= self.nvme_bytes


class Ledger:
    """GPUs, host memory and NVMe of one node over time: held now by running jobs, later by those placed here."""

    def __init__(self, node: NodeState, running: Sequence[RunningJob], now_s: float) -> None:
        self.node, self.running, self.now_s = node, list(running), now_s
        taken = {job.gpu for job in running}
        self.free_gpus: list[Gpu] = [gpu for gpu in node.gpus if gpu.state == "free" and gpu.id not in taken]
        """GPUs on which a job can start now."""
        self._gpu_ends = sorted(
            [now_s] * len(self.free_gpus)
            + [now_s + job.remaining_s for job in running if job.gpu is not None and self._healthy(job.gpu)]
        )
        self._holds = sorted(
            (now_s + job.remaining_s, job.option.host_bytes, job.option.nvme_bytes) for job in self.running
        )

    def copy(self) -> Ledger:
        """A ledger of its own with the same entries."""
        twin = object.__new__(Ledger)
        twin.node, twin.running, twin.now_s = self.node, self.running, self.now_s
        twin.free_gpus = list(self.free_gpus)
        twin._gpu_ends, twin._holds = list(self._gpu_ends), list(self._holds)
        return twin

    def room(self, at_s: float) -> Room:
        """What is left at ``at_s``. What is placed for later counts as held from now on."""
        host, nvme = self._held(at_s)
        return Room(bisect_right(self._gpu_ends, at_s), self.node.host_bytes - host, self.node.nvme_bytes - nvme)

    def earliest(self, option: Option, not_before_s: float) -> float | None:
        """The first moment from ``not_before_s`` on at which ``option`` fits; None if it never will."""
        if not self._gpu_ends or not self.large_enough(option):
            return None
        at_s = max(not_before_s, self._gpu_ends[0])
        while at_s < float("inf"):
            host, nvme = self._held(at_s)
            if host + option.host_bytes <= self.node.host_bytes and nvme + option.nvme_bytes <= self.node.nvme_bytes:
                return at_s
            at_s = self._holds[bisect_right(self._holds, (at_s, float("inf"), float("inf")))][0]
        return None

    def next_free(self, after_s: float) -> float:
        """When a GPU that is taken at ``after_s`` becomes free; infinity if none will."""
        place = bisect_right(self._gpu_ends, after_s)
        return self._gpu_ends[place] if place < len(self._gpu_ends) else float("inf")

    def place(self, option: Option, start_s: float, end_s: float) -> None:
        """Hold what ``option`` needs until ``end_s``, on the GPU that is idle for the shortest time before."""
        del self._gpu_ends[bisect_right(self._gpu_ends, start_s) - 1]
        insort(self._gpu_ends, end_s)
        insort(self._holds, (end_s, option.host_bytes, option.nvme_bytes))

    def large_enough(self, option: Option) -> bool:
        """Whether the node could hold it when nothing else runs."""
        return option.host_bytes <= self.node.host_bytes and option.nvme_bytes <= self.node.nvme_bytes

    @property
    def usable(self) -> bool:
        """Whether a job may ever start here as things stand: it is open and has a GPU that is not bad."""
        return self.node.open and any(gpu.state != "bad" for gpu in self.node.gpus)

    def _healthy(self, gpu_id: str) -> bool:
        return any(gpu.id == gpu_id and gpu.state != "bad" for gpu in self.node.gpus)

    def _held(self, at_s: float) -> tuple[int, int]:
        host = nvme = 0
        for end_s, host_bytes, nvme_bytes in reversed(self._holds):
            if end_s <= at_s:
                break
            host += host_bytes
            nvme += nvme_bytes
        return host, nvme
