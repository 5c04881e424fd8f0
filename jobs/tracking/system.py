"""What a run takes of its machine: memory, processor, disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

INTERVAL_S = 10.0
"""Shortest time between two readings."""


class SystemMetrics:
    """Readings for the metric log: with the first step, then at most every ten seconds."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._read_at: float | None = None
        self._cpu_s = _cpu_s()

    def read(self) -> dict[str, float]:
        """``system/...`` figures, or nothing when the last reading is recent."""
        now, cpu_s = self._clock(), _cpu_s()
        if self._read_at is not None and now - self._read_at < INTERVAL_S:
            return {}
        figures = {
            "system/rss_bytes": float(_status("self/status", "VmRSS")),
            "system/host_available_bytes": float(_status("meminfo", "MemAvailable")),
            "system/disk_free_bytes": float(shutil.disk_usage(self._directory).free),
        }
        if self._read_at is not None:
            figures["system/cpu_cores"] = (cpu_s - self._cpu_s) / (now - self._read_at)
        import torch  # here, because the service reads and forwards figures where there is none

        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            figures["system/gpu_used_bytes"] = float(total - free)
        self._read_at, self._cpu_s = now, cpu_s
        return figures


def _cpu_s() -> float:
    """Processor seconds of this process and of the children that have ended."""
    return sum(os.times()[:4])


def _status(file: str, key: str) -> int:
    """A figure of Linux's /proc, in bytes; 0 where there is none."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
