"""What people ask of jobs, in every state."""

import random
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.cluster.runs import Phase

S = JobState
World = Any


def test_stopping_a_queued_job(world: World) -> None:
    job = world.submit()
    number = world.ask(job, "stop")
    world.steps(1)
    assert world.state(job) is S.STOPPED
    assert world.store.jobs.answer_to(number) == ""
    world.steps(3)
    assert world.runner.started == []


def test_stopping_a_running_job_waits_until_it_has_left(world: World) -> None:
    job = world.submit()
    run = world.running(job)
    run.ignores_stop = True
    world.ask(job, "stop")
    world.steps(3)
    assert world.state(job) is S.STOPPING
    assert run.asked_to_stop >= 1
    run.ignores_stop = False
    world.steps(2)
    assert world.state(job) is S.STOPPED
    assert run.phase is Phase.ENDED


def test_a_run_that_does_not_leave_is_killed_after_its_time(world: World) -> None:
    job = world.submit()
    run = world.running(job)
    run.ignores_stop = True
    world.ask(job, "stop")
    world.steps(3)
    assert world.state(job) is S.STOPPING
    world.steps(3, seconds=40)
    assert world.state(job) is S.STOPPED
    assert run.outcome is not None
    assert run.outcome.signal == 9


def test_a_large_job_has_longer_to_save(world: World) -> None:
    world.planner.memory_bytes = 100 << 30
    job = world.submit()
    run = world.running(job)
    run.ignores_stop = True
    world.ask(job, "stop")
    world.steps(1)
    world.steps(5, seconds=200)
    assert world.state(job) is S.STOPPING
    assert run.outcome is None
    world.steps(3, seconds=200)
    assert world.state(job) is S.STOPPED


def test_stop_while_starting_is_not_undone_by_a_late_start(world: World) -> None:
    job = world.submit()
    world.steps(3)
    run = world.run(job)
    run.ignores_stop = True
    world.ask(job, "stop")
    world.steps(1)
    run.phase = Phase.RUNNING
    world.steps(2)
    assert world.state(job) is S.STOPPING
    run.ignores_stop = False
    world.steps(2)
    assert world.state(job) is S.STOPPED


def test_two_hundred_queued_and_three_running_stop_in_one_step(world: World) -> None:
    world.add_machine("b", gpus=2)
    running = [world.submit() for _ in range(3)]
    world.steps(5)
    for job in running:
        world.run(job).phase = Phase.RUNNING
    queued = [world.submit() for _ in range(200)]
    for job in [*running, *queued]:
        world.ask(job, "stop")
    world.steps(2)
    assert {world.state(job) for job in queued} == {S.STOPPED}
    world.steps(1)
    assert {world.state(job) for job in running} == {S.STOPPED}
    assert len(world.runner.started) == 3


def test_pause_and_resume_go_on_from_the_checkpoint(world: World) -> None:
    job = world.submit()
    run = world.running(job)
    run.step = 40
    world.ask(job, "pause", checkpoint=True)
    world.steps(2)
    assert world.state(job) is S.PAUSED
    world.steps(3)
    assert world.state(job) is S.PAUSED
    assert world.job(job).claim is None
    world.ask(job, "resume")
    world.steps(2)
    assert world.state(job) is S.STARTING
    assert world.job(job).attempt == 2
    assert world.job(job).outcome["step"] == 40


@pytest.mark.parametrize(
    ("action", "why"), [("pause", "only a running job"), ("resume", "only a paused job"), ("remove", "stop it before")]
)
def test_what_is_not_possible_is_answered_in_words(world: World, action: str, why: str) -> None:
    world.add_machine("a", gpus=0)
    job = world.submit()
    world.steps(1)
    number = world.ask(job, action)
    if action == "resume":
        world.ask(job, "stop")
        number = world.ask(job, action)
    world.steps(1)
    assert why in world.store.jobs.answer_to(number)


def test_a_priority_can_be_set_until_the_end(world: World) -> None:
    job = world.submit()
    world.ask(job, "set", priority=99)
    world.steps(1)
    assert world.job(job).priority == 99
    world.ask(job, "stop")
    late = world.ask(job, "set", priority=1)
    world.steps(4)
    assert world.store.jobs.answer_to(late)
    assert world.job(job).priority == 99


@pytest.mark.parametrize("files", [True, False])
def test_removing_takes_the_files_only_when_told_to(world: World, files: bool) -> None:
    job = world.submit()
    world.running(job)
    world.finish(job)
    world.steps(1)
    world.ask(job, "remove", files=files)
    world.steps(1)
    assert world.store.jobs.list() == []
    assert Path(job.run_dir).exists() is not files


def test_files_that_are_not_the_jobs_are_never_removed(world: World) -> None:
    job = world.submit()
    Path(job.run_dir).mkdir(parents=True)
    (Path(job.run_dir) / "thesis.txt").touch()
    world.steps(2)
    assert world.state(job) is S.REJECTED
    world.ask(job, "remove", files=True)
    world.steps(1)
    assert (Path(job.run_dir) / "thesis.txt").exists()


def test_random_interleavings_never_leave_a_final_state(world: World) -> None:
    """Hundreds of random events: final stays final, and at the end nothing of a final job lives."""
    draw = random.Random(7)
    jobs: list[Any] = []
    ended: dict[str, JobState] = {}
    world.add_machine("b", gpus=2)
    for _ in range(200):
        event = draw.choice(["submit", "stop", "pause", "resume", "run", "finish", "die", "lose", "restart", "step"])
        job = draw.choice(jobs) if jobs else None
        if event == "submit" and len(jobs) < 20:
            jobs.append(world.submit(priority=draw.randrange(100)))
        elif event == "restart" and draw.random() < 0.2:
            world.new_controller()
        elif event in ("stop", "pause", "resume") and job:
            world.ask(job, event)
        elif job and world.job(job).claim in world.runner.all:
            change(world, event, job, draw)
        world.steps(1, seconds=draw.choice([0.1, 1, 20]))
        for known in world.store.jobs.list():
            assert ended.get(known.id, known.state) is known.state or not ended[known.id].final
            ended[known.id] = known.state
    assert len({state for state in ended.values() if state.final}) >= 2
    for job in jobs:
        world.ask(job, "stop")
    world.steps(10, seconds=40)
    assert all(world.state(job).final for job in jobs)
    assert world.runner.runs() == set()


def change(world: World, event: str, job: Any, draw: random.Random) -> None:
    run = world.run(job)
    if run.phase not in (Phase.STARTING, Phase.RUNNING):
        return
    if event == "run":
        run.phase = Phase.RUNNING
    elif event == "finish" and run.phase is Phase.RUNNING:
        world.finish(job)
    elif event == "die":
        world.end(job, how="died", signal=draw.choice([9, 11]))
    elif event == "lose":
        del world.runner.all[run.order.claim]
