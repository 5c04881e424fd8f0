"""The local metric log: append-only, each step once, unharmed by kills and by values that are not finite."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain.jobs.tracking import MetricLog, read_metrics


def values(path: Path, name: str) -> list[tuple[int, float | None]]:
    return [(row["step"], row[name]) for row in read_metrics(path) if name in row]


def test_rows_are_plain_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    log = MetricLog(path)
    assert log.append(1, {"loss": 2.5, "tokens": 7})
    assert log.append(2, {"loss": 2.0})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [set(row) for row in rows] == [{"step", "time", "loss", "tokens"}, {"step", "time", "loss"}]
    assert read_metrics(path) == rows
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_each_metric_has_each_step_once_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    first = MetricLog(path)
    for step in range(1, 13):
        first.append(step, {"loss": float(step)})
    first.append(10, {"eval_loss": 0.5})  # another metric of an old step is news
    assert not first.append(12, {"loss": -1.0})
    first.close()
    resumed = MetricLog(path)
    for step in range(11, 21):
        resumed.append(step, {"loss": float(step), "eval_loss": 0.0})
    assert values(path, "loss") == [(step, float(step)) for step in range(1, 21)]
    assert values(path, "eval_loss") == [(10, 0.5)] + [(step, 0.0) for step in range(11, 21)]


@pytest.mark.parametrize("tail", [1, 7, 1 << 16])
@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_is_skipped_and_removed(
    tmp_path: Path, cut: int, tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazytrain.jobs.tracking.metric_log._TAIL_BYTES", tail)
    path = tmp_path / "m.jsonl"
    log = MetricLog(path)
    log.append(1, {"loss": 1.0})
    log.append(2, {"loss": 2.0})
    log.close()
    os.truncate(path, path.stat().st_size - cut)
    assert values(path, "loss") == [(1, 1.0)]
    again = MetricLog(path)
    again.append(2, {"loss": 2.0})
    assert values(path, "loss") == [(1, 1.0), (2, 2.0)]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_damage_inside_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    MetricLog(path).append(1, {"loss": 1.0})
    with path.open("ab") as file:
        file.write(b'\x00\x00\x00\n{"no": "step"}\n[1]\n\n')
    MetricLog(path).append(2, {"loss": 2.0})
    assert values(path, "loss") == [(1, 1.0), (2, 2.0)]


def test_values_that_are_not_finite_are_null_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log = MetricLog(path)
    for step, value in enumerate((1.0, math.nan, math.inf, 0.5), start=1):
        log.append(step, {"loss": value})
    log.close()
    MetricLog(path).append(5, {"loss": -math.inf})
    assert values(path, "loss") == [(1, 1.0), (2, None), (3, None), (4, 0.5), (5, None)]
    assert values(path, "nonfinite/loss") == [(2, 1), (3, 2), (5, 3)]
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()


@pytest.mark.parametrize("name", ["step", "time", "nonfinite/loss"])
def test_names_of_the_log_itself_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        MetricLog(tmp_path / "m.jsonl").append(1, {name: 1.0})


KILLED = """
import os, signal, sys
from lazytrain.jobs.tracking import MetricLog
log = MetricLog(sys.argv[1])
for step in range(1, 101):
    log.append(step, {"loss": float(step)})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert values(path, "loss") == [(step, float(step)) for step in range(1, 101)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.sampled_from("abc"), st.booleans()), max_size=40))
def test_any_order_of_reports_and_restarts_keeps_steps_single(
    tmp_path_factory: pytest.TempPathFactory, reports: list[tuple[int, str, bool]]
) -> None:
    path = tmp_path_factory.mktemp("log") / "m.jsonl"
    log = MetricLog(path)
    for step, name, restart in reports:
        if restart:
            log.close()
            log = MetricLog(path)
        log.append(step, {name: 1.0})
    for name in "abc":
        steps = [step for step, _ in values(path, name)]
        assert steps == sorted(set(steps))
