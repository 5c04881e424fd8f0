"""Host memory that this process may use: the control group's limit and working set, not the machine's RAM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60
"""Control groups of version 1 write a number near 2**63 for "no limit"."""
_LIMITS = ("memory.max", "memory.high")
"""Beyond the first a process is killed; beyond the second it is held up at every page that it asks for."""
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Page cache and the like: counted as used by the kernel, given back when somebody asks."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory as the kernel enforces them."""

    limit_bytes: int
    used_bytes: int
    """The working set: what is in use and cannot be given back (page cache left out)."""
    source: str
    """``cgroup v2``, ``cgroup v1`` or ``machine``."""

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be asked for."""
        return max(0, self.limit_bytes - self.used_bytes)


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The tightest limit on this process; ``root`` is where ``proc`` and ``sys`` are found."""
    machine = _machine(root)
    groups = [*_version_2(root), *_version_1(root)]
    limited = [group for group in groups if group.limit_bytes < machine.limit_bytes]
    if not limited:
        return machine
    tightest = min(limited, key=lambda group: group.free_bytes)
    free = min(tightest.free_bytes, machine.free_bytes)
    return HostMemory(tightest.limit_bytes, tightest.limit_bytes - free, tightest.source)


def _machine(root: Path) -> HostMemory:
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    kib = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
    total = kib["MemTotal"] * 1024
    return HostMemory(total, total - kib["MemAvailable"] * 1024, "machine")


def _version_2(root: Path) -> Iterator[HostMemory]:
    mount = root / "sys/fs/cgroup"
    if not (mount / "cgroup.controllers").exists():
        return
    for group in _groups(mount, _path_of(root, "")):
        limits = [limit for limit in (_number(group / name) for name in _LIMITS) if limit is not None]
        used = _number(group / "memory.current")
        if limits and used is not None:
            yield HostMemory(min(limits), max(0, used - _reclaimable(group, "")), "cgroup v2")


def _version_1(root: Path) -> Iterator[HostMemory]:
    mount = root / "sys/fs/cgroup/memory"
    for group in _groups(mount, _path_of(root, "memory")):
        limit = _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _NO_LIMIT:
            yield HostMemory(limit, max(0, used - _reclaimable(group, "total_")), "cgroup v1")


def _path_of(root: Path, controller: str) -> str:
    """This process's group below the mount; lines are ``hierarchy:controllers:path``."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.strip("/")
    return ""


def _groups(mount: Path, path: str) -> Iterator[Path]:
    """The group and all above it: a limit anywhere on the way up holds. In a container the path may not exist."""
    group = mount / path if (mount / path).is_dir() else mount
    while True:
        yield group
        if group == mount:
            return
        group = group.parent


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _reclaimable(group: Path, prefix: str) -> int:
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    stat = {name: int(value) for name, value in (line.split() for line in lines)}
    return sum(stat.get(prefix + name, 0) for name in _RECLAIMABLE)
