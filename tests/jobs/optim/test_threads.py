"""Threads: what the process was given, whichever of mask, quota, torch and caller says the least."""

import os
from pathlib import Path

import pytest
import torch

from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.optim.threads import usable_threads


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def machine(root: Path, groups: str, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_mask_and_the_caller_bound(tmp_path: Path) -> None:
    assert usable_threads(99, tmp_path) == 16
    assert usable_threads(3, tmp_path) == 3
    assert usable_threads(None, tmp_path) == torch.get_num_threads() == 1


@pytest.mark.parametrize(("limit", "threads"), [("max 100000", 16), ("250000 100000", 3), ("50000 100000", 1)])
def test_quota_of_version_2(tmp_path: Path, limit: str, threads: int) -> None:
    root = machine(tmp_path, "0::/jobs/one\n", **{"jobs/one/cpu.max": "max 100000", "jobs/cpu.max": limit})
    assert usable_threads(99, root) == threads


def test_quota_inside_a_container_lies_on_the_mount(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", **{"cpu.max": "400000 100000\n"})
    assert usable_threads(99, root) == 4


def test_quota_of_version_1(tmp_path: Path) -> None:
    files = {"cpu/a/cpu.cfs_quota_us": "200000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}
    root = machine(tmp_path, "5:cpu,cpuacct:/a\n3:memory:/a\n0::/\n", **files)
    assert usable_threads(99, root) == 2
    assert usable_threads(99, machine(tmp_path / "free", "5:cpu:/a\n", **{"cpu/a/cpu.cfs_quota_us": "-1\n"})) == 16


def test_the_kernel_gets_at_most_what_was_given() -> None:
    kernel = HybridAdamW(threads=2)._kernel
    assert kernel is None or kernel.threads <= 2
    kernel = HybridAdamW()._kernel
    assert kernel is None or kernel.threads == 1  # torch's number, in the tests
