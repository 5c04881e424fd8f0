from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazytrain.jobs.data.cache import SAFE_S, prune
from lazytrain.jobs.data.store import Writer, stored
from lazytrain.jobs.errors import DataError

NOW = 10**9


def entry(cache: Path, name: str, *, age_s: float, size: int) -> None:
    (cache / name).mkdir()
    (cache / name / "rows.arrow").write_bytes(b"x" * size)
    os.utime(cache / name, (NOW - age_s, NOW - age_s))


def test_the_longest_unused_go_first_and_recent_ones_never(tmp_path: Path) -> None:
    for name, days in (("a" * 16, 9), ("b" * 16, 5), ("c" * 16, 7), ("d" * 16, 0.5)):
        entry(tmp_path, name, age_s=days * 24 * 3600, size=100)
    entry(tmp_path, "a person's folder", age_s=9e6, size=1000)
    assert prune(tmp_path, largest_bytes=400, now=NOW) == []
    assert prune(tmp_path, largest_bytes=250, now=NOW) == ["a" * 16, "c" * 16]
    assert prune(tmp_path, largest_bytes=0, now=NOW) == ["b" * 16]
    assert {path.name for path in tmp_path.iterdir()} == {"d" * 16, "a person's folder"}


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    entry(tmp_path, f".{'a' * 16}.x1y2", age_s=SAFE_S + 1, size=10)
    entry(tmp_path, f".{'b' * 16}.x1y2", age_s=SAFE_S - 1, size=10)
    assert prune(tmp_path, now=NOW) == [f".{'a' * 16}.x1y2"]


def test_a_folder_that_is_used_again_is_recent(tmp_path: Path) -> None:
    def fill(writer: Writer) -> dict[str, object]:
        writer.write([[1, 2]], [[(1, 2)]], [("p", "a")], 0)
        return {}

    key = "0123456789abcdef"
    stored(tmp_path, key, fill)
    os.utime(tmp_path / key, (NOW, NOW))
    store, _ = stored(tmp_path, key, fill)
    assert (tmp_path / key).stat().st_mtime > NOW + 10**6
    assert store.tokens(0).tolist() == [1, 2]


def test_a_cache_that_another_process_prunes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes a folder between our look at the cache and our look into the folder."""
    for name in ("a" * 16, "b" * 16):
        entry(tmp_path, name, age_s=2 * SAFE_S, size=100)
    look = Path.iterdir

    def gone(folder: Path) -> Iterator[Path]:
        if folder.name == "a" * 16:
            shutil.rmtree(folder)
        return look(folder)

    monkeypatch.setattr(Path, "iterdir", gone)
    assert prune(tmp_path, largest_bytes=0, now=NOW) == ["b" * 16]


def test_a_report_that_is_cut_off_is_named(tmp_path: Path) -> None:
    key = "0123456789abcdef"
    stored(tmp_path, key, lambda writer: writer.write([[1, 2]], [[(1, 2)]], [("p", "a")], 0) or {"rows": 1})
    (tmp_path / key / "report.json").write_bytes(b'{"ro')
    with pytest.raises(DataError, match=f"{key}: damaged report") as caught:
        stored(tmp_path, key, lambda writer: {})
    assert caught.value.hint == "delete this folder"
