"""Which steps are recorded, and what is kept of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lazytrain.jobs.run_directory import RunDirectory
from lazytrain.jobs.timeline import Span, Timeline
from lazytrain.jobs.train.tracing import EVERY, FIRST, IN_TURN, Tracing


class Streamed:
    """Records one operation a step, and the end of one of the step before."""

    def __init__(self) -> None:
        self.taken = 0
        self.on = False
        self.spans = 2

    def trace(self, on: bool = True) -> None:
        self.on = on

    def timeline(self) -> Timeline:
        assert self.on
        spans = [Span("update", "cpu", -1.0, 0.5), *[Span("forward", "compute", 0.0, self.taken)] * (self.spans - 1)]
        return Timeline(spans, float(self.taken))


def take(streamed: Streamed, tracing: Tracing, steps: int) -> list[int]:
    """Take steps; those that were recorded."""
    recorded = []
    for _ in range(steps):
        streamed.taken += 1
        tracing.begin()
        if streamed.on:
            recorded.append(streamed.taken)
        tracing.end(streamed.taken, {"stall_h2d_s": 0.25})
        assert not streamed.on
    return recorded


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_few_steps_in_turn_are_recorded_once_in_a_while(tmp_path: Path) -> None:
    streamed, directory = Streamed(), RunDirectory(tmp_path)
    tracing = Tracing(streamed, directory)  # type: ignore[arg-type]
    assert take(streamed, tracing, FIRST) == [FIRST]
    assert read(directory.timeline)["step"] == FIRST and not directory.steps.exists()
    first = list(range(FIRST, FIRST + IN_TURN))
    assert take(streamed, tracing, IN_TURN - 1) == first[1:]
    found = [Timeline.from_dict(values) for values in read(directory.steps)["steps"]]
    assert [timeline.step_s for timeline in found] == first
    assert [[span.op for span in timeline.spans] for timeline in found] == [["forward"]] * IN_TURN
    assert found[0].exposed_s == {"h2d": 0.25}
    assert take(streamed, tracing, EVERY) == [step + EVERY for step in first]
    assert [values["step_s"] for values in read(directory.steps)["steps"]] == [step + EVERY for step in first]
    assert read(directory.timeline)["step"] == FIRST + EVERY


def test_steps_of_a_policy_that_was_left_do_not_count(tmp_path: Path) -> None:
    streamed, directory = Streamed(), RunDirectory(tmp_path)
    tracing = Tracing(streamed, directory)  # type: ignore[arg-type]
    take(streamed, tracing, FIRST + 1)
    tracing.forget()
    take(streamed, tracing, 1)
    assert [values["step_s"] for values in read(directory.steps)["steps"]] == [FIRST + 2]


def test_a_step_of_too_many_operations_is_not_kept(tmp_path: Path) -> None:
    streamed, directory = Streamed(), RunDirectory(tmp_path)
    streamed.spans = 9_000
    take(streamed, Tracing(streamed, directory), EVERY)  # type: ignore[arg-type]
    assert not directory.timeline.exists() and not directory.steps.exists()
