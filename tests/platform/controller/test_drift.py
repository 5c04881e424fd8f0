"""A run that measures another machine than planned is given another policy."""

import os
from typing import Any

import pytest

from lazytrain.jobs.errors import OutOfTime
from lazytrain.platform.admission import Answer, Question
from lazytrain.platform.artifacts import JobFiles, read_json

World = Any
CALIBRATION = {
    "steps": 3,
    "measured_s": 2.0,
    "predicted_s": 1.0,
    "calibrated_s": 1.9,
    "sentence": "100.0% more than was predicted",
}
NOTHING = {"policy": None, "words": "", "tokens_per_s": 0.0, "calibration": CALIBRATION}
NEW = {
    **NOTHING,
    "policy": {"kind": "H800", "found": "later"},
    "words": "h2d at 0.50 of its planned rate",
    "tokens_per_s": 90.0,
}


class DriftPlanner:
    """Answers questions as the test says; ``jobs`` plans jobs."""

    def __init__(self, jobs: Any) -> None:
        self.jobs = jobs
        self.questions: list[Question] = []
        self.open: list[Question] = []
        self.answer: Any = Answer(values=NEW)

    def submit(self, order: Any) -> None:
        if isinstance(order, Question):
            self.questions.append(order)
            self.open.append(order)
        else:
            self.jobs.submit(order)

    def results(self) -> dict[str, Any]:
        answered, self.open = self.open, []
        return {**self.jobs.results(), **{question.job: self.answer for question in answered}}

    def close(self) -> None:
        pass


@pytest.fixture
def lab(world: World) -> World:
    world.planner = DriftPlanner(world.planner)
    world.new_controller()
    return world


def traced(lab: World, job: Any, *, seconds_ago: float = 0.0, left_s: float = 1000.0) -> None:
    """The run has recorded steps."""
    run = lab.run(job)
    run.step, run.step_s, run.beat = 3, left_s / 97, run.beat + 1
    steps = JobFiles(lab.job(job).run_dir).steps
    steps.write_text("{}")
    os.utime(steps, times=(lab.now - seconds_ago, lab.now - seconds_ago))


def test_the_new_policy_is_carried_out_kept_and_told(lab: World) -> None:
    job = lab.submit()
    run = lab.running(job)
    lab.steps(5)
    traced(lab, job)
    lab.steps(3)
    (question,) = lab.planner.questions
    assert question.kind == "drift"
    assert question.values["policy"] == {"kind": "H800"}
    assert question.values["steps"] == str(JobFiles(lab.job(job).run_dir).steps)
    assert run.policies == [NEW["policy"]]
    assert (lab.job(job).reason, lab.job(job).sentence) == (
        "replanned",
        "trains on a by a new plan; h2d at 0.50 of its planned rate",
    )
    lab.steps(3)
    assert len(lab.planner.questions) == 1  # each traced step is asked about once
    lab.end(job, how="died", message="gone")
    lab.steps(6, seconds=60.0)
    assert lab.run(job).order.policy == NEW["policy"]


def test_each_traced_step_is_asked_about(lab: World) -> None:
    lab.planner.answer = Answer(values=NOTHING)
    job = lab.submit()
    run = lab.running(job)
    for _ in range(2):
        lab.steps(2)
        traced(lab, job)
        lab.steps(2)
    assert len(lab.planner.questions) == 2
    assert run.policies == []
    assert (lab.job(job).reason, lab.job(job).sentence) == ("running", "trains on a")
    assert read_json(JobFiles(lab.job(job).run_dir).calibration) == CALIBRATION
    (told,) = [event for event in lab.store.jobs.events(job.id) if event.reason == "calibrated"]  # the first time only
    assert told.sentence == f"trains on a; {CALIBRATION['sentence']}"


def test_a_full_disk_does_not_keep_a_run_from_its_new_policy(lab: World) -> None:
    job = lab.submit()
    run = lab.running(job)
    lab.steps(2)
    traced(lab, job)
    JobFiles(lab.job(job).run_dir).calibration.mkdir()  # cannot be written
    lab.steps(2)
    assert run.policies == [NEW["policy"]]


def test_a_planner_that_fails_changes_nothing(lab: World) -> None:
    lab.planner.answer = OutOfTime("no plan")
    job = lab.submit()
    run = lab.running(job)
    lab.steps(2)
    traced(lab, job)
    lab.steps(3)
    assert len(lab.planner.questions) == 1
    assert (run.policies, lab.job(job).reason) == ([], "running")


@pytest.mark.parametrize("how", [{"left_s": 100.0}, {"seconds_ago": 900.0}], ids=["ends soon", "of an earlier run"])
def test_what_is_not_asked_about(lab: World, how: dict[str, float]) -> None:
    job = lab.submit()
    lab.running(job)
    lab.steps(2)
    traced(lab, job, **how)
    lab.steps(3)
    assert lab.planner.questions == []
