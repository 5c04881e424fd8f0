"""Paused jobs: their state is in the memory of their node, until somebody needs that."""

from typing import Any

import pytest

from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.cluster.runs import Outcome, Phase
from lazytrain.schedulers.placement import decide

S = JobState
World = Any


def paused(world: World, job: Any) -> Any:
    run = world.running(job)
    run.step = 40
    world.ask(job, "pause")
    world.steps(2)
    assert world.state(job) is S.PAUSED
    return run


def test_it_keeps_its_process_and_gives_its_gpu_to_others(world: World) -> None:
    job = world.submit()
    run = paused(world, job)
    assert run.phase is Phase.PAUSED
    assert run.asked_to_stop == 0
    assert (world.job(job).gpu, world.job(job).claim) == (None, run.order.claim)
    assert "in the memory of a" in world.job(job).sentence
    other = world.submit()
    world.running(other)
    world.new_controller()  # whoever leads next leaves it alone
    world.steps(5)
    assert world.state(job) is S.PAUSED
    assert run.phase is Phase.PAUSED
    assert world.runner.runs() == {run.order.claim, world.job(other).claim}


def test_it_goes_on_in_the_same_process_where_it_was(world: World) -> None:
    job = world.submit()
    run = paused(world, job)
    world.ask(job, "resume")
    world.steps(1)
    assert (world.state(job), world.job(job).gpu) == (S.STARTING, "0")
    world.steps(1)
    assert (world.state(job), world.job(job).attempt) == (S.RUNNING, 1)
    assert run.phase is Phase.RUNNING
    assert len(world.runner.started) == 1
    world.finish(job)
    world.steps(1)
    assert world.state(job) is S.SUCCEEDED


def test_a_controller_that_is_killed_in_between_lets_it_go_on(world: World) -> None:
    job = world.submit()
    run = paused(world, job)
    run.ignores_pause = True
    world.ask(job, "resume")
    world.steps(1)
    assert run.phase is Phase.PAUSED
    world.new_controller()
    run.ignores_pause = False
    world.steps(2)
    assert (world.state(job), run.phase) == (S.RUNNING, Phase.RUNNING)


def test_without_its_gpu_it_goes_on_from_a_checkpoint_wherever_there_is_a_place(world: World) -> None:
    job = world.submit()
    run = paused(world, job)
    world.running(world.submit())
    world.ask(job, "resume")
    world.steps(3)
    assert run.outcome == Outcome(how="stopped", step=40)
    assert world.state(job) is S.QUEUED
    assert world.job(job).outcome["step"] == 40
    world.add_machine("b")
    world.steps(4)
    assert (world.state(job), world.job(job).node, world.job(job).attempt) == (S.STARTING, "b", 2)


def test_a_gpu_that_does_not_come_back_is_not_waited_for(world: World) -> None:
    job = world.submit(queue={"retries": 2, "max_duration": 3600.0})
    run = paused(world, job)
    run.ignores_pause = True
    world.ask(job, "resume")
    world.steps(5, seconds=60)
    assert run.outcome is not None
    assert run.outcome.how == "stopped"
    world.steps(2)
    assert (world.state(job), world.job(job).attempt) == (S.STARTING, 2)
    assert world.job(job).user_failures == 0


def test_a_run_that_does_not_come_to_the_end_of_its_step_saves_and_leaves(world: World) -> None:
    job = world.submit()
    run = world.running(job)
    run.ignores_pause = True
    world.ask(job, "pause")
    world.steps(3)
    assert (world.state(job), run.asked_to_stop) == (S.PAUSING, 0)
    world.steps(2, seconds=200)
    world.steps(2)
    assert (world.state(job), world.job(job).claim) == (S.PAUSED, None)
    assert run.outcome == Outcome(how="stopped", step=0)


def test_it_leaves_when_another_job_needs_its_memory(world: World) -> None:
    """Placement decides; the node's memory holds one of the two."""
    world.planner.memory_bytes = 1200 << 30
    world.decide = decide
    job = world.submit()
    run = paused(world, job)
    other = world.submit()
    world.steps(2)
    assert world.job(job).reason in ("spilling", "paused")
    world.steps(4)
    assert run.outcome == Outcome(how="stopped", step=40)
    assert (world.state(job), world.job(job).claim) == (S.PAUSED, None)
    assert world.state(other) is S.STARTING
    world.ask(job, "resume")
    world.steps(2)
    assert world.state(job) is S.QUEUED


def test_it_leaves_on_request(world: World) -> None:
    job = world.submit()
    run = paused(world, job)
    world.ask(job, "pause", checkpoint=True)
    world.steps(2)
    assert run.outcome == Outcome(how="stopped", step=40)
    assert (world.state(job), world.job(job).claim, world.job(job).reason) == (S.PAUSED, None, "paused")
    assert "in a checkpoint" in world.job(job).sentence


@pytest.mark.parametrize("how", ["killed", "vanished"])
def test_what_was_only_in_memory_can_be_lost_and_the_job_is_not(world: World, how: str) -> None:
    job = world.submit()
    run = paused(world, job)
    if how == "killed":
        world.end(job, how="died", signal=9)
    else:
        run.phase = Phase.LOST
    world.steps(12)
    assert (world.state(job), world.job(job).claim) == (S.PAUSED, None)
    assert "lost" in world.job(job).sentence
    world.ask(job, "resume")
    world.steps(2)
    assert (world.state(job), world.job(job).attempt) == (S.STARTING, 2)


def test_it_can_be_stopped(world: World) -> None:
    job = world.submit()
    run = paused(world, job)
    world.ask(job, "stop")
    world.steps(2)
    assert world.state(job) is S.STOPPED
    assert run.outcome == Outcome(how="stopped", step=40)
    assert world.runner.runs() == set()
