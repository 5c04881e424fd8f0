"""A run of the command line that is planned again. The planner is a stand-in: its answers have tests of their own."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import DoesNotFit
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.run_directory import RunDirectory
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.admission import Answer, Found, Question
from lazytrain.platform.admission.measuring import Here
from lazytrain.platform.cli.replanning import Replanning

CALIBRATION = {
    "steps": 3,
    "measured_s": 1.09,
    "predicted_s": 1.0,
    "calibrated_s": 1.08,
    "sentence": "9.0% more than was predicted",
}
NOTHING = {"words": "", "policy": None, "tokens_per_s": 0.0, "calibration": None}
LONG = {"step": 3.0, "total_steps": 1000.0, "step_s": 1.0}


class Planner:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[Question] = []
        self.answer: Found | None = None
        self.closed = False

    def submit(self, order: Any) -> None:
        self.asked.append(order)

    def results(self) -> dict[str, Found]:
        return {} if self.answer is None else {self.asked[-1].job: self.answer}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def policy(tiny_job: Path, tmp_path: Path) -> Policy:
    facts = Here(tmp_path / "facts").facts(load_spec(tiny_job), batch=4, length=32, dtype="float32")
    return Policy.from_homes(facts, ["host" for _ in facts.layers] + ["gpu"])


@pytest.fixture
def directory(policy: Policy, tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    policy.save(directory.policy)
    directory.steps.write_text("{}")
    os.utime(directory.steps, (1, 1))  # of an earlier process of the run
    return directory


def test_each_trace_is_asked_about_once_and_a_better_policy_left_for_the_run(
    directory: RunDirectory, policy: Policy
) -> None:
    planners: list[Planner] = []
    said: list[str] = []

    def start() -> Planner:
        planners.append(Planner())
        return planners[-1]

    replanning = Replanning(directory, {"spec": {"a": 1}}, start, said.append)
    replanning.hear(LONG)
    assert not planners  # the trace is an old one
    os.utime(directory.steps, (2, 2))
    replanning.hear({"step": 5.0, "total_steps": 6.0})
    assert not planners  # it ends soon
    replanning.hear({**LONG, "step": 6.0})
    replanning.hear({**LONG, "step": 7.0})
    (planner,) = planners
    (question,) = planner.asked
    assert (question.kind, question.values["spec"]) == ("drift", {"a": 1})
    assert Policy.model_validate(question.values["policy"]) == policy
    assert question.values["steps"] == str(directory.steps)

    new = policy.model_copy(update={"weight_slots": 3})
    dumped = new.model_dump(mode="json", by_alias=True)
    values = {"words": "half the time", "policy": dumped, "tokens_per_s": 1.0, "calibration": CALIBRATION}
    planner.answer = Answer(values=values)
    replanning.hear({**LONG, "step": 8.0})
    assert planner.closed
    assert said == ["9.0% more than was predicted", "half the time"]
    assert json.loads(directory.calibration.read_text()) == CALIBRATION
    assert Policy.load(directory.next_policy) == new
    replanning.hear({**LONG, "step": 9.0})
    assert len(planners) == 1
    os.utime(directory.steps, (3, 3))
    replanning.hear({**LONG, "step": 10.0})
    planners[1].answer = Answer(values={**values, "words": "", "policy": None})
    replanning.hear({**LONG, "step": 11.0})
    assert len(said) == 2  # how far off the prediction was is told once


@pytest.mark.parametrize("answer", [Answer(values=NOTHING), DoesNotFit("too large")])
def test_without_a_better_policy_the_run_goes_on(directory: RunDirectory, answer: Found) -> None:
    planner, said = Planner(), list[str]()
    planner.answer = answer
    replanning = Replanning(directory, {}, lambda: planner, said.append)
    os.utime(directory.steps, (2, 2))
    replanning.hear(LONG)
    replanning.hear(LONG)
    assert planner.closed and not said and not directory.next_policy.exists()


def test_the_planner_ends_with_the_run(directory: RunDirectory) -> None:
    planner = Planner()
    replanning = Replanning(directory, {}, lambda: planner, print)
    os.utime(directory.steps, (2, 2))
    replanning.hear(LONG)
    replanning.close()
    replanning.close()
    assert planner.closed
    assert json.loads(directory.policy.read_text())
