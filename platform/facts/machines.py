"""Facts of what is in use on the machines: GPUs, host memory, NVMe, and the memory of each GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ...jobs.units import format_bytes
from ...schedulers.drawing import UsageBar
from ..schemas import JobView, NodeView


def node_usage(node: NodeView, jobs: Iterable[JobView]) -> list[UsageBar]:
    """Bars of one node: GPUs taken, memory that jobs hold, and of ``jobs`` those here with the GPU memory they reached.

    Host memory and NVMe are what all jobs there were given, also other people's.
    """
    profile = node.profile
    bars = [
        _gpus("GPUs", node.busy, node.gpus),
        _memory("host memory", node.held_host_bytes, profile.get("host_memory_bytes") or 0),
        _memory("NVMe", node.held_nvme_bytes, profile.get("nvme_bytes") or 0),
    ]
    for job in jobs:
        if job.id in node.jobs and job.progress is not None and job.progress.gpu_bytes is not None:
            bars.append(_memory(f"GPU: {job.name}", job.progress.gpu_bytes, profile.get("gpu_memory_bytes") or 0))
    return [bar for bar in bars if bar.total]


def lab_usage(nodes: Sequence[NodeView]) -> list[UsageBar]:
    """Bars of all living nodes together: GPUs by kind, host memory, NVMe."""
    alive = [node for node in nodes if node.alive]
    used: dict[str, int] = defaultdict(int)
    total: dict[str, float] = defaultdict(float)
    for node in alive:
        used[node.kind] += node.busy
        total[node.kind] += node.gpus
    bars = [_gpus(kind, used[kind], total[kind]) for kind in sorted(total)]
    host = sum(float(node.profile.get("host_memory_bytes") or 0) for node in alive)
    nvme = sum(float(node.profile.get("nvme_bytes") or 0) for node in alive)
    bars.append(_memory("host memory", sum(node.held_host_bytes for node in alive), host))
    bars.append(_memory("NVMe", sum(node.held_nvme_bytes for node in alive), nvme))
    return [bar for bar in bars if bar.total]


def _gpus(label: str, used: float, total: float) -> UsageBar:
    return UsageBar(label, min(used, total), total, f"{min(used, total):g} of {total:g} used")


def _memory(label: str, used: float, total: float) -> UsageBar:
    return UsageBar(label, used, total, f"{format_bytes(used)} of {format_bytes(total)}")
