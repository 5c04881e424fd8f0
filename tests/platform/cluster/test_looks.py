"""How a run is doing is read from files that its user can damage, and that another version may have written."""

import os
from pathlib import Path

import pytest

from lazytrain.platform.artifacts import JobFiles, write_json
from lazytrain.platform.cluster.ray_runner import RayRunner
from lazytrain.platform.cluster.runs import Phase

BEAT = {"beat": 3, "step": 2, "total_steps": 9, "step_s": 0.5, "paused": False, "doing": ""}


@pytest.fixture
def runner() -> RayRunner:
    """One that knows without a Ray that the run ``c`` lives."""
    made: RayRunner = object.__new__(RayRunner)
    made._alive = (float("inf"), {"c"})
    return made


def test_a_beat(runner: RayRunner, tmp_path: Path) -> None:
    write_json(JobFiles(tmp_path).attempt(1).beat, {**BEAT, "of_a_newer_version": 1})
    look = runner.look("c", tmp_path, 1)
    assert (look.phase, look.beat, look.step, look.total_steps, look.step_s) == (Phase.RUNNING, 3, 2, 9, 0.5)


@pytest.mark.parametrize("content", ["{}", '{"beat": "x"}', '{"step_s": 1e999}', '{"step": -1}', "[" * 100_000, "pipe"])
def test_what_is_no_beat_stops_nobody_from_looking(runner: RayRunner, tmp_path: Path, content: str) -> None:
    files = JobFiles(tmp_path).attempt(1)
    files.path.mkdir(parents=True)
    if content == "pipe":  # whoever opens it to read would wait for ever
        os.mkfifo(files.beat)
    else:
        files.beat.write_text(content)
    assert runner.look("c", tmp_path, 1).phase in (Phase.STARTING, Phase.RUNNING)
    files.exit.write_text('{"exit_code": "none", "signal": 9}')
    look = runner.look("c", tmp_path, 1)
    assert look.phase is Phase.ENDED
    assert look.outcome is not None
    assert (look.outcome.how, look.outcome.exit_code, look.outcome.signal) == ("died", None, 9)


def test_an_outcome_that_is_none_counts_as_nothing_said(runner: RayRunner, tmp_path: Path) -> None:
    files = JobFiles(tmp_path).attempt(1)
    write_json(files.beat, BEAT)
    write_json(files.exit, {"exit_code": 1, "signal": None, "because": ""})
    write_json(files.outcome, {"how": ["done"], "step": "all"})
    look = runner.look("c", tmp_path, 1)
    assert look.outcome is not None
    assert (look.outcome.how, look.outcome.exit_code, look.outcome.step) == ("died", 1, 2)
