"""Metrics by name: only what was added is read again, damage is passed over, and answers stay small."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lazytrain.platform.api import series
from lazytrain.platform.api.series import SeriesReader


def write(path: Path, rows: Iterable[dict[str, Any]], mode: str = "w") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    write(path, ({"step": k, "time": 0.0, "loss": 1 / k, "rate": 1e-5} for k in range(1, 101)))
    return path


def test_each_metric_has_its_steps(log: Path) -> None:
    write(log, [{"step": 50, "time": 0.0, "eval_loss": 0.7}, {"step": 101, "loss": None}], "a")
    found = SeriesReader().read(log, ["loss", "eval_loss", "absent"], 1000).series
    assert sorted(found) == ["eval_loss", "loss"]
    assert (found["eval_loss"].steps, found["eval_loss"].values) == ([50], [0.7])
    assert found["loss"].steps == list(range(1, 102)) and found["loss"].values[-1] is None
    assert found["loss"].count == 101


def test_only_what_was_added_is_read(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    rows_of = series.read_rows

    def counted(path: Path, *, offset: int = 0, limit_bytes: int = 0) -> Any:
        rows, behind = rows_of(path, offset=offset, limit_bytes=limit_bytes)
        read.append(len(rows))
        return rows, behind

    monkeypatch.setattr(series, "read_rows", counted)
    reader = SeriesReader()
    for _ in range(3):
        reader.read(log, ["loss"], 10)
    assert read == [100]
    write(log, [{"step": 101, "loss": 0.5}], "a")
    answer = reader.read(log, ["loss"], 10).series["loss"]
    assert read == [100, 1] and answer.steps[-1] == 101 and answer.count == 101 and len(answer.steps) <= 13


def test_half_a_line_is_read_when_it_is_whole(log: Path) -> None:
    reader = SeriesReader()
    with log.open("a") as file:
        file.write('{"step": 101, "lo')
        file.flush()
        assert reader.read(log, ["loss"], 1000).series["loss"].count == 100
        file.write('ss": 0.25}\n')
    assert reader.read(log, ["loss"], 1000).series["loss"].values[-1] == 0.25


def test_a_log_that_was_begun_anew_is_read_anew(log: Path) -> None:
    reader = SeriesReader()
    reader.read(log, ["loss"], 1000)
    log.unlink()
    assert reader.read(log, ["loss"], 1000).series["loss"].count == 100  # what was there until it is there again
    write(log, [{"step": 1, "loss": 3.0}])
    assert reader.read(log, ["loss"], 1000).series["loss"].values == [3.0]
    write(log, [{"step": 1, "loss": 4}])
    assert reader.read(log, ["loss"], 1000).series["loss"].count == 1


def test_rubbish_is_passed_over(log: Path) -> None:
    with log.open("a") as file:
        file.write('{"step": "x", "loss": 1}\nnonsense\n[1]\n{"loss": 1}\n{"step": -1, "loss": 1}\n')
        file.write('{"step": 200, "loss": "x", "deep": {"a": 1}, "big": Infinity, "vast": 1%s}\n' % ("0" * 400))
    found = SeriesReader().read(log, ["loss", "deep", "big", "vast"], 1000).series
    assert found["loss"].count == 100 and "deep" not in found and found["big"].values == found["vast"].values == [None]


def test_only_so_many_values_and_names_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_MOST_VALUES", 1000)
    reader = SeriesReader()
    for k in range(8):
        path = tmp_path / f"{k}.jsonl"
        write(path, [{"step": 1, **{f"m{i}": 0.0 for i in range(300)}}])
        assert len(reader.read(path, [f"m{i}" for i in range(300)], 10).series) == 200
    assert [path.stem for path in reader._logs] == ["3", "4", "5", "6", "7"]
