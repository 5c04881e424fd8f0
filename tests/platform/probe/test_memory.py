"""Files as they were found on real machines, under a root of their own."""

from pathlib import Path

import pytest

from lazytrain.platform.probe.memory import host_memory

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", f"MemTotal:       {256 * 2**20} kB\nMemAvailable:   {200 * 2**20} kB")
    return tmp_path


def write(root: Path, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_without_a_limit_it_is_the_machine(root: Path) -> None:
    memory = host_memory(root)
    assert (memory.limit_bytes, memory.free_bytes, memory.source) == (256 * GIB, 200 * GIB, "machine")


def test_version_2_leaves_the_page_cache_out(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/job.slice/job")
    write(root, "sys/fs/cgroup/cgroup.controllers", "memory")
    write(root, "sys/fs/cgroup/job.slice/memory.max", "max")
    write(root, "sys/fs/cgroup/job.slice/memory.current", 60 * GIB)
    group = "sys/fs/cgroup/job.slice/job/"
    write(root, group + "memory.max", 64 * GIB)
    write(root, group + "memory.current", 53 * GIB)
    write(
        root,
        group + "memory.stat",
        f"anon {8 * GIB}\nfile {45 * GIB}\nactive_file {15 * GIB}\ninactive_file {30 * GIB}",
    )
    memory = host_memory(root)
    assert (memory.limit_bytes, memory.used_bytes, memory.source) == (64 * GIB, 8 * GIB, "cgroup v2")


def test_version_2_shared_memory_counts_as_used(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/")
    write(root, "sys/fs/cgroup/cgroup.controllers", "memory")
    write(root, "sys/fs/cgroup/memory.max", 10 * GIB)
    write(root, "sys/fs/cgroup/memory.current", 7 * GIB)
    # Files of a tmpfs are in "file" but cannot be given back, so they are in neither list of page cache.
    write(root, "sys/fs/cgroup/memory.stat", f"file {5 * GIB}\nshmem {5 * GIB}\nactive_file 0\ninactive_file 0")
    assert host_memory(root).free_bytes == 3 * GIB


def test_a_tighter_group_above_holds(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/outer/inner")
    write(root, "sys/fs/cgroup/cgroup.controllers", "memory")
    for group, limit in (("outer", 16), ("outer/inner", 64)):
        write(root, f"sys/fs/cgroup/{group}/memory.max", limit * GIB)
        write(root, f"sys/fs/cgroup/{group}/memory.current", 1 * GIB)
        write(root, f"sys/fs/cgroup/{group}/memory.stat", "active_file 0")
    assert host_memory(root).limit_bytes == 16 * GIB


@pytest.mark.parametrize("most, high, limit", [("max", 24, 24), (16, 24, 16), (64, 24, 24)])
def test_version_2_a_limit_that_only_slows_down_is_one_too(root: Path, most: str | int, high: int, limit: int) -> None:
    """As systemd's MemoryHigh: what is above it is reclaimed all the time, and the process waits for that."""
    write(root, "proc/self/cgroup", "0::/job")
    write(root, "sys/fs/cgroup/cgroup.controllers", "memory")
    write(root, "sys/fs/cgroup/job/memory.max", most if isinstance(most, str) else most * GIB)
    write(root, "sys/fs/cgroup/job/memory.high", high * GIB)
    write(root, "sys/fs/cgroup/job/memory.current", 1 * GIB)
    memory = host_memory(root)
    assert (memory.limit_bytes, memory.free_bytes) == (limit * GIB, (limit - 1) * GIB)


def test_version_1(root: Path) -> None:
    write(root, "proc/self/cgroup", "11:cpu:/x\n5:memory,hugetlb:/docker/abc\n1:name=systemd:/")
    # Inside a container the path is the host's; the container's own group is mounted at the top.
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 32 * GIB)
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", 20 * GIB)
    write(
        root,
        "sys/fs/cgroup/memory/memory.stat",
        f"inactive_file 1\ntotal_inactive_file {12 * GIB}\ntotal_active_file 0",
    )
    memory = host_memory(root)
    assert (memory.limit_bytes, memory.free_bytes, memory.source) == (32 * GIB, 24 * GIB, "cgroup v1")


def test_version_1_without_a_limit(root: Path) -> None:
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", 20 * GIB)
    assert host_memory(root).source == "machine"


def test_the_machine_may_be_fuller_than_the_group(root: Path) -> None:
    write(root, "proc/meminfo", f"MemTotal: {256 * 2**20} kB\nMemAvailable: {2 * 2**20} kB")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 32 * GIB)
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", 1 * GIB)
    assert host_memory(root).free_bytes == 2 * GIB


def test_this_machine() -> None:
    memory = host_memory()
    assert 0 < memory.free_bytes <= memory.limit_bytes
