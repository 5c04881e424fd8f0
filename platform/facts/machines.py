"""Facts of what is in use on the machines: GPUs, their memory, host memory, NVMe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ...jobs.units import format_bytes
from ...schedulers.drawing import UsageBar
from ..schemas import JobView, NodeView


def node_usage(node: NodeView, jobs: Iterable[JobView]) -> list[UsageBar]:
    """Bars of one node; ``jobs`` may be more than those that run there."""
    here = [job for job in jobs if job.node == node.name and job.id in node.jobs]
    bars = [_gpus("GPUs", len(node.jobs), node.gpus)]
    profile = node.profile
    gpu_bytes = float(profile.get("gpu_memory_bytes") or 0) * node.gpus
    bars.append(_memory("GPU memory", _sum(here, "gpu_bytes"), gpu_bytes))
    bars.append(_memory("host memory", _sum(here, "host_bytes"), float(profile.get("host_memory_bytes") or 0)))
    bars.append(_memory("NVMe", _sum(here, "nvme_bytes"), float(profile.get("nvme_bytes") or 0)))
    return [bar for bar in bars if bar.total]


def lab_usage(nodes: Sequence[NodeView], jobs: Iterable[JobView]) -> list[UsageBar]:
    """Bars of all living nodes together: GPUs by kind, host memory, NVMe."""
    alive = [node for node in nodes if node.alive]
    known = [job for job in jobs if any(job.id in node.jobs for node in alive)]
    used, total = defaultdict[str, int](int), defaultdict[str, float](float)
    for node in alive:
        if node.gpus:
            used[node.kind] += len(node.jobs)
            total[node.kind] += node.gpus
    bars = [_gpus(kind, used[kind], total[kind]) for kind in sorted(total)]
    for label, field, profile_field in (
        ("host memory", "host_bytes", "host_memory_bytes"),
        ("NVMe", "nvme_bytes", "nvme_bytes"),
    ):
        size = sum(float(node.profile.get(profile_field) or 0) for node in alive)
        bars.append(_memory(label, _sum(known, field), size))
    return [bar for bar in bars if bar.total]


def _gpus(label: str, used: int, total: float) -> UsageBar:
    return UsageBar(label, min(float(used), total), total, f"{min(used, total):g} of {total:g} used")


def _memory(label: str, used: float, total: float) -> UsageBar:
    return UsageBar(label, used, total, f"{format_bytes(used)} of {format_bytes(total)}")


def _sum(jobs: Iterable[JobView], field: str) -> float:
    return float(sum(getattr(job.progress, field) for job in jobs if job.progress is not None))
