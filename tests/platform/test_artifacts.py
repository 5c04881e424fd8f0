"""Whose a directory is, and reading of files that may be huge, damaged or absent."""

import errno
import os
import resource
import time
from pathlib import Path

import pytest

from lazytrain.jobs.errors import InputError
from lazytrain.platform.artifacts import (
    JobFiles,
    inside,
    last_lines,
    read_json,
    read_log,
    read_rows,
    secret_file,
    write_json,
)


def test_a_directory_belongs_to_the_job_that_claimed_it(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "out" / "j-1")
    files.claim("j-1")
    (files.path / "model").mkdir()
    files.claim("j-1")
    assert files.belongs_to("j-1")
    with pytest.raises(InputError, match="does not belong to job j-2"):
        files.claim("j-2")
    assert files.belongs_to("j-1")


def test_a_loop_of_links_is_where_it_begins(tmp_path: Path) -> None:
    (tmp_path / "there").symlink_to("back")
    (tmp_path / "back").symlink_to("there")
    assert inside(tmp_path / "there" / "rows.jsonl", tmp_path)
    assert not inside(tmp_path / "there", tmp_path / "elsewhere")


def test_a_directory_with_somebodys_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match="not empty"):
        JobFiles(tmp_path).claim("j-1")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_every_attempt_has_files_of_its_own(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    write_json(files.attempt(1).outcome, {"status": "done"})
    assert read_json(files.attempt(2).outcome) is None
    assert read_json(files.attempt(1).outcome) == {"status": "done"}


@pytest.mark.parametrize(
    "content", [b"", b'{"half', b"[" * 100_000, b"[1]", b"\xff\xfe", b'{"a": "' + b"x" * (2 << 20) + b'"}']
)
def test_a_record_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r.json").write_bytes(content)
    assert read_json(tmp_path / "r.json") is None


def test_a_huge_log_costs_nothing_to_look_at(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with log.open("wb") as file:
        file.truncate(2 << 30)
        file.seek(2 << 30)
        file.write(b"the end\n")
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    text, offset = read_log(log)
    assert text.endswith("the end\n")
    assert offset == (2 << 30) + 8
    assert time.perf_counter() - started < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 5 << 10


def test_a_log_is_followed_by_its_offset(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert read_log(log) == ("", 0)
    log.write_bytes(b"one\n")
    text, offset = read_log(log, offset=0)
    with log.open("ab") as file:
        file.write(b"two\n")
    assert (text, read_log(log, offset=offset)) == ("one\n", ("two\n", 8))
    assert read_log(log, offset=10**9) == ("", 8)


def test_progress_bars_leave_one_line_and_bad_bytes_do_not_matter(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(b"".join(b"\r%d of 100000" % i for i in range(100_000)) + b"\nbad \xff\x00 bytes\r\nend\n")
    assert last_lines(log, 3) == "99999 of 100000\nbad \ufffd\ufffd bytes\nend"
    assert last_lines(log, 1) == "end"


def test_rows_are_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\nnonsense\n{"step": 2}\n{"st')
    rows, offset = read_rows(path)
    assert rows == [{"step": 1}, {"step": 2}]
    with path.open("ab") as file:
        file.write(b'ep": 3}\n')
    assert read_rows(path, offset=offset)[0] == [{"step": 3}]
    assert read_rows(tmp_path / "none") == ([], 0)


def test_a_log_read_in_parts_is_whole_again(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    text = "".join(f"Zeile {k}: äöü €\n" for k in range(200)) + "ohne Ende €"
    path.write_text(text, encoding="utf-8")
    found, offset = "", 0
    while True:
        part, behind = read_log(path, offset=offset, limit=100)
        if behind == offset:
            break
        found, offset = found + part, behind
    assert found == text


def test_a_secret_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "home" / "token"
    secret = secret_file(path)
    assert len(secret) == 64
    assert secret_file(path) == secret
    assert [found.name for found in path.parent.iterdir()] == ["token"]
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(InputError, match="others may read"):
        secret_file(path)


def test_a_full_disk_leaves_no_empty_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody would know it."""
    path = tmp_path / "token"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(os, "fsync", full)
        secret_file(path)
    assert list(tmp_path.iterdir()) == []
    path.touch(mode=0o600)
    with pytest.raises(InputError, match="holds no secret"):
        secret_file(path)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_json(tmp_path / "pipe") is None
    assert read_log(tmp_path / "pipe") == ("", 0)
    assert read_rows(tmp_path / "pipe") == ([], 0)
