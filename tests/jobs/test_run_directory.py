"""Who holds a run's directory, how long others wait for it, and that its small files are whole or not there."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from lazytrain.jobs import run_directory
from lazytrain.jobs.errors import InputError, LazytrainError
from lazytrain.jobs.run_directory import LOCK, WATCHED, RunDirectory, write_atomically
from lazytrain.jobs.spec import JobSpec

SPEC = JobSpec.model_validate(
    {"name": "x", "model": {"path": "m"}, "data": {"train": [{"path": "rows.jsonl"}]}, "output": {"dir": "out"}}
)


def test_a_job_of_a_service_waits_for_what_mlflow_has_to_hear_of_the_attempt_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To fail at once had ended jobs for good whose node was lost while MLflow was slow."""
    (tmp_path / WATCHED).touch()
    now, telling = 0.0, (tmp_path / LOCK).open("a")
    fcntl.flock(telling, fcntl.LOCK_EX)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 5.0
        if now == 30.0:
            telling.close()

    monkeypatch.setattr(run_directory.time, "sleep", sleep)
    monkeypatch.setattr(run_directory.time, "monotonic", lambda: now)
    with RunDirectory(tmp_path).claimed(SPEC):
        assert now == 30.0


@pytest.mark.parametrize(("watched", "waited_s"), [(True, 60.0), (False, 0.5)])
def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: bool, waited_s: float) -> None:
    if watched:
        (tmp_path / WATCHED).touch()
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 0.25

    monkeypatch.setattr(run_directory.time, "sleep", sleep)
    monkeypatch.setattr(run_directory.time, "monotonic", lambda: now)
    with (tmp_path / LOCK).open("a") as held, pytest.raises(LazytrainError) as caught:
        fcntl.flock(held, fcntl.LOCK_EX)
        with RunDirectory(tmp_path).claimed(SPEC):
            pass
    assert now == waited_s
    assert isinstance(caught.value, InputError) is not watched  # which a service would not try again


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
