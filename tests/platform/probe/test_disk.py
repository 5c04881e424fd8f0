import os
from pathlib import Path

import pytest

from lazytrain.platform.probe import disk
from lazytrain.platform.probe.disk import filesystem_of, probe_disk

SIZE = 8 * 2**20


def on_disk(path: Path) -> str:
    return "ext4"


def test_a_disk_is_measured_and_left_clean(tmp_path: Path) -> None:
    tier = probe_disk(tmp_path, size_bytes=SIZE, filesystem=on_disk)
    assert tier.available, tier.reason
    assert tier.read_bytes_s > 0
    assert tier.write_bytes_s > 0
    assert tier.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_missing_directory(tmp_path: Path) -> None:
    tier = probe_disk(tmp_path / "none", filesystem=on_disk)
    assert (tier.available, tier.reason) == (False, "unavailable (missing)")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert probe_disk(tmp_path / "file", filesystem=on_disk).reason == "unavailable (not a directory)"


def test_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "there").symlink_to("back")
    (tmp_path / "back").symlink_to("there")
    tier = probe_disk(tmp_path / "there")
    assert not tier.available and tier.reason


def test_no_permission() -> None:
    # Not even root may make files in sysfs, so this holds for whoever runs the tests.
    assert probe_disk("/sys", filesystem=on_disk).reason == "unavailable (permission)"


def test_ram_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tier = probe_disk(tmp_path, filesystem=lambda path: "tmpfs")
    assert (tier.available, tier.reason) == (False, "refused (RAM-backed)")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, data: 1)
    assert probe_disk(tmp_path, filesystem=on_disk).reason == "unavailable (full)"
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.os, "read", lambda descriptor, size: b"\0" * size)
    tier = probe_disk(tmp_path, size_bytes=SIZE, filesystem=on_disk)
    assert not tier.available
    assert "not the bytes written" in tier.reason


def test_the_deepest_mount_decides(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "23 22 0:5 / /scratch rw shared:1 - tmpfs tmpfs rw\n"
        "24 23 9:1 / /scratch/nvme\\0401 rw - xfs /dev/nvme0n1 rw\n"
    )
    assert filesystem_of(Path("/home"), mounts) == "ext4"
    assert filesystem_of(Path("/scratch/x"), mounts) == "tmpfs"
    assert filesystem_of(Path("/scratch/nvme 1/x"), mounts) == "xfs"
