"""Small files of a run are there whole or not at all, and nothing is left beside them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lazytrain.jobs.run_directory import write_atomically


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for text in ("before", "ü ☃"):
        write_atomically(tmp_path / "file", text)
        assert [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()] == [text]


def test_a_write_that_fails_changes_nothing_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_atomically(tmp_path / "file", "before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "file", "after")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "before"
