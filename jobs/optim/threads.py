"""How many threads an update may take: what this process was given, not what the machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch


def usable_threads(given: int | None = None, root: Path = Path("/")) -> int:
    """The threads to use: at most ``given``, torch's own number, the cores of the affinity mask and the group's quota.

    ``root`` is where ``proc`` and ``sys`` are found. At least 1.
    """
    limits = [_affinity(), *(math.ceil(share) for share in _quotas(root))]
    limits.append(torch.get_num_threads() if given is None else given)
    return max(1, min(limits))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """Cores that the control groups around this process allow, of version 2 and of version 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        for group in _with_parents(mount, path):
            quota, period = _limit(group) if controllers == "" else _limit_version_1(group)
            if quota > 0 and period > 0:
                yield quota / period


def _with_parents(mount: Path, path: str) -> Iterator[Path]:
    """The group and those around it; in a container the path may be the host's, then the mount itself is the group."""
    group = mount / path.strip("/")
    while group != mount and group.is_relative_to(mount):
        yield group
        group = group.parent
    yield mount


def _limit(group: Path) -> tuple[float, float]:
    words = _read(group / "cpu.max").split()
    return (float(words[0]), float(words[1])) if len(words) == 2 and words[0] != "max" else (0.0, 0.0)


def _limit_version_1(group: Path) -> tuple[float, float]:
    quota, period = _read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()
    return (float(quota), float(period)) if quota and period else (0.0, 0.0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
