"""A job that is tried again goes on where the one before came to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.artifacts import JobFiles

S = JobState
World = Any


def failed(world: World, steps: tuple[int, ...] = (20, 40)) -> Any:
    job = world.submit(queue={"retries": 0})
    world.running(job)
    for number, step in enumerate(steps):
        saved = JobFiles(job.run_dir).checkpoints / f"step-{step:08d}-{number:06d}"
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text(str(step))
    world.end(job, how="error", message="unexpected KeyError: 'x'", exit_code=1, step=45)
    world.steps(1)
    assert world.state(job) is S.FAILED
    return job


def waiting(world: World) -> Any:
    """Who waited when placement was last asked while somebody did."""
    return next(question.waiting for question in reversed(world.questions) if question.waiting)


def test_it_has_the_checkpoints_the_batch_and_less_to_do(world: World) -> None:
    before = failed(world)
    job = world.submit(continues=before.id)
    world.steps(3)
    assert world.state(job) is S.STARTING
    assert world.planner.asked[-1].batch == 8
    mine = JobFiles(job.run_dir).checkpoints / "step-00000040-000001" / "manifest.json"
    theirs = JobFiles(before.run_dir).checkpoints / "step-00000040-000001" / "manifest.json"
    assert mine.samefile(theirs)  # linked, not copied
    (asked,) = waiting(world)
    assert asked.options[0].work_tokens == 0.6 * 1e4
    world.ask(before, "remove", files=True)
    world.steps(1)
    assert mine.read_text() == "40"  # the one before may go
    assert not theirs.exists()


def test_without_a_checkpoint_it_begins_anew(world: World) -> None:
    before = failed(world, steps=())
    job = world.submit(continues=before.id)
    world.steps(3)
    assert world.state(job) is S.STARTING
    assert waiting(world)[0].options[0].work_tokens == 1e4


def test_a_folder_that_is_not_the_other_jobs_is_left_alone(world: World) -> None:
    before = failed(world)
    JobFiles(before.run_dir).owner.unlink()
    job = world.submit(continues=before.id)
    world.steps(3)
    assert world.state(job) is S.STARTING
    assert not JobFiles(job.run_dir).checkpoints.exists()


def test_a_link_that_was_cut_off_is_made_again(world: World) -> None:
    before = failed(world)
    job = world.submit(continues=before.id)
    half = Path(job.run_dir) / ".checkpoints" / "step-00000020-000000"
    JobFiles(job.run_dir).claim(job.id)
    half.mkdir(parents=True)
    world.steps(3)
    assert sorted(p.name for p in JobFiles(job.run_dir).checkpoints.iterdir()) == [
        "step-00000020-000000",
        "step-00000040-000001",
    ]


def test_of_a_run_that_died_mlflow_hears_although_its_job_goes_on(world: World) -> None:
    told: list[str] = []
    world.config = replace(world.config, mlflow_uri="sqlite:///x", tell_lost=told.append)
    world.new_controller()
    job = world.submit()
    world.running(job)
    world.end(job, how="died", signal=9)
    world.steps(1)
    assert world.state(job) is S.RECOVERING
    assert told == [job.run_dir]
