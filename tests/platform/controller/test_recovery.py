"""Failures, retries, and a controller that is killed at any moment."""

from typing import Any

import pytest

from lazytrain.jobs.errors import HardwareError
from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.cluster.runs import HOST_LOST, Outcome, Phase
from lazytrain.platform.controller.failures import Failure, Tally, classify, judge

S = JobState
World = Any


@pytest.mark.parametrize(
    ("outcome", "failure"),
    [
        ({"code": "out_of_memory", "message": "out of memory on gpu: 3 bytes more wanted"}, Failure.OUT_OF_MEMORY),
        ({"message": "CUDA out of memory. Tried to allocate 2.00 GiB"}, Failure.OUT_OF_MEMORY),
        ({"message": "CUDA error: uncorrectable ECC error encountered"}, Failure.GPU_FAULT),
        ({"message": "CUDA error: an illegal memory access was encountered"}, Failure.GPU_FAULT),
        ({"message": "GPU has fallen off the bus (Xid 79)"}, Failure.GPU_FAULT),
        ({"code": "invalid_data", "message": "no usable row", "final": True}, Failure.USER_ERROR),
        ({"code": "non_finite", "message": "gradient is not finite", "final": True}, Failure.USER_ERROR),
        ({"how": "died", "signal": 9}, Failure.KILLED),
        ({"how": "died", "signal": 15}, Failure.KILLED),
        ({"how": "died", "signal": 11}, Failure.UNKNOWN),
        ({"how": "died", "code": HOST_LOST, "signal": 9}, Failure.NODE_LOST),
        ({"code": "gpu_busy", "message": "the GPU has 3GiB free"}, Failure.GPU_BUSY),
        ({"message": "unexpected KeyError: 'x'", "exit_code": 1}, Failure.UNKNOWN),
    ],
)
def test_the_class_of_a_failure(outcome: dict[str, Any], failure: Failure) -> None:
    assert classify(Outcome(**{"how": "error", **outcome})) is failure


def test_the_verdicts() -> None:
    fresh, tired = Tally(0, 0, 0, 2), Tally(2, 2, 1, 2)
    refused, again = {Failure.USER_ERROR}, {Failure.GPU_BUSY, Failure.DISK_FULL}
    assert {f for f in Failure if not judge(f, fresh).again} == refused
    assert {f for f in Failure if judge(f, tired).again} == again
    assert judge(Failure.UNKNOWN, Tally(0, 3, 0, 9)).pause_s == 80
    assert judge(Failure.UNKNOWN, Tally(0, 30, 0, 99)).pause_s == 600


def test_out_of_memory_is_planned_again_with_less_once(world: World) -> None:
    job = world.submit()
    for round in (0, 1):
        world.running(job)
        world.end(job, how="error", code="out_of_memory", message="out of memory on gpu", step=3)
        world.steps(1)
        assert world.state(job) is (S.RECOVERING if round == 0 else S.FAILED)
    assert [order.memory_share for order in world.planner.asked] == [1.0, 0.85]
    assert world.planner.asked[1].batch == 8  # what is learned stays the same
    assert world.job(job).reason == "out_of_memory"
    assert world.job(job).replans == 2
    assert len(world.runner.started) == 2


def test_a_gpu_fault_moves_the_job_and_counts_against_the_node(world: World) -> None:
    world.add_machine("b")
    job = world.submit()
    world.running(job)
    world.end(job, how="error", message="CUDA error: uncorrectable ECC error encountered")
    world.steps(3)
    assert world.state(job) is S.STARTING
    assert world.job(job).node == "b"
    assert world.store.nodes.get("a").faults == 1
    assert world.job(job).infra_failures == 1


def test_a_node_with_many_faults_takes_no_more_jobs(world: World) -> None:
    for _ in range(3):
        job = world.submit()
        world.running(job)
        world.end(job, how="error", message="CUDA error: uncorrectable ECC error encountered")
        world.steps(2)
        world.ask(job, "stop")
        world.steps(1)
    node = world.store.nodes.get("a")
    assert node.drained
    assert "3 GPU or disk faults, the last: CUDA error: uncorrectable ECC" in node.reason


def test_a_user_error_is_not_tried_again(world: World) -> None:
    job = world.submit()
    world.running(job)
    world.end(job, how="error", code="invalid_data", message="line 7 of x.jsonl has no answer", final=True, step=0)
    world.steps(3)
    assert world.state(job) is S.FAILED
    assert world.job(job).user_failures == 1
    assert world.job(job).infra_failures == 0
    assert "line 7 of x.jsonl" in world.job(job).sentence
    assert len(world.runner.started) == 1


def test_an_unknown_failure_waits_longer_each_time(world: World) -> None:
    job = world.submit()
    for pause in (10, 20):
        world.running(job)
        world.end(job, how="error", message="unexpected KeyError: 'x'", exit_code=1, step=5)
        world.steps(2)
        assert world.state(job) is S.QUEUED
        assert f"in {pause} s" in world.job(job).sentence
        world.steps(pause - 4)
        assert world.state(job) is S.QUEUED
        world.steps(4)
        assert world.state(job) is S.STARTING
    world.running(job)
    world.end(job, how="error", message="unexpected KeyError: 'x'", exit_code=1, step=5)
    world.steps(1)
    assert world.state(job) is S.FAILED
    assert "used up its retries" in world.job(job).sentence


def test_a_lost_node_lets_its_job_go_on_elsewhere(world: World) -> None:
    job = world.submit()
    run = world.running(job)
    world.add_machine("b")
    del world.runner.there["a"]
    run.phase = Phase.LOST
    world.steps(5)
    assert world.state(job) is S.RUNNING  # it may still leave word
    world.steps(10)
    assert world.state(job) is S.STARTING
    assert world.job(job).node == "b"
    assert world.job(job).infra_failures == 1
    assert world.job(job).user_failures == 0


def test_without_another_node_it_waits(world: World) -> None:
    job = world.submit()
    run = world.running(job)
    del world.runner.there["a"]
    run.phase = Phase.LOST
    world.steps(20)
    assert world.state(job) is S.QUEUED
    world.add_machine("a")
    world.steps(2)
    assert world.state(job) is S.STARTING


def test_retries_of_lost_nodes_are_bounded(world: World) -> None:
    job = world.submit(queue={"retries": 1})
    for _ in range(2):
        world.running(job).phase = Phase.LOST
        world.steps(14)
    assert world.state(job) is S.FAILED
    assert "vanished" in world.job(job).sentence
    assert len(world.runner.started) == 2


def test_a_run_without_a_beat_is_ended_and_started_again(world: World) -> None:
    job = world.submit()
    run = world.running(job)
    for _ in range(10):
        run.beat += 1
        world.steps(1, seconds=60)
    assert world.state(job) is S.RUNNING
    world.steps(3, seconds=60)
    assert world.state(job) in (S.RECOVERING, S.QUEUED, S.STARTING)
    assert run.outcome is not None
    assert run.outcome.signal == 9


def test_a_run_that_does_not_begin(world: World) -> None:
    job = world.submit(queue={"retries": 0})
    world.steps(3)
    world.steps(4, seconds=90)
    assert world.state(job) is S.FAILED
    assert "did not begin within 180 s" in world.job(job).sentence
    assert world.runner.runs() == set()


def test_a_start_that_the_machines_refuse(world: World) -> None:
    world.runner.refuses = HardwareError("node a has no such GPU")
    job = world.submit(queue={"retries": 0})
    world.steps(3)
    assert world.state(job) is S.FAILED
    assert "no such GPU" in world.job(job).sentence


def test_a_time_limit_is_no_failure_to_try_again(world: World) -> None:
    job = world.submit(queue={"retries": 2, "max_duration": 60.0})
    world.running(job)
    world.end(job, how="stopped", step=12)
    world.steps(2)
    assert (world.state(job), world.job(job).reason) == (S.FAILED, "time_limit")
    assert "step 12" in world.job(job).sentence


# ---- the controller is killed


def test_a_new_controller_finds_every_job_and_starts_none_twice(world: World) -> None:
    """Case U84: QUEUED, STARTING, RUNNING (alive), RUNNING (dead), STOPPING."""
    world.add_machine("b", gpus=4)
    alive, dead, stopping, starting = (world.submit() for _ in range(4))
    world.steps(3)
    for job in (alive, dead, stopping):
        world.run(job).phase = Phase.RUNNING
    world.run(stopping).ignores_stop = True
    world.steps(1)
    world.ask(stopping, "stop")
    world.steps(1)
    queued = world.submit("queued", resources={"gpu": ["A100-80GB"]})
    before = world.job(alive).claim
    assert [world.state(job) for job in (starting, alive, dead, stopping, queued)] == [
        S.STARTING,
        S.RUNNING,
        S.RUNNING,
        S.STOPPING,
        S.QUEUED,
    ]

    world.new_controller()
    del world.runner.all[world.job(dead).claim]
    world.run(stopping).ignores_stop = False
    world.steps(1)
    world.steps(3)
    assert world.state(stopping) is S.STOPPED
    world.steps(11)
    assert world.state(alive) is S.RUNNING
    assert world.job(alive).claim == before
    assert world.state(starting) is S.STARTING
    assert world.job(starting).attempt == 1
    assert "RECOVERING" in [event.state for event in world.store.jobs.events(dead.id)]
    assert world.job(dead).infra_failures == 1
    assert world.state(queued) is S.QUEUED
    assert [order.job for order in world.runner.started].count(alive.id) == 1
    assert [order.job for order in world.runner.started].count(starting.id) == 1


def test_killed_between_the_record_and_the_start(world: World) -> None:
    """Case U83: after the restart the job runs once."""
    job = world.submit()
    world.runner.interrupt_start = True
    with pytest.raises(KeyboardInterrupt):
        world.steps(3)
    assert world.state(job) is S.STARTING
    assert world.runner.started == []
    world.runner.interrupt_start = False
    world.new_controller()
    world.steps(2)
    assert world.state(job) is S.STARTING
    assert len(world.runner.started) == 1
    assert world.job(job).infra_failures == 0
    world.running(job)
    world.finish(job)
    world.steps(1)
    assert world.state(job) is S.SUCCEEDED


def test_what_was_planned_is_not_planned_again(world: World) -> None:
    """Case U85."""
    job = world.submit()
    world.running(job)
    plan = world.store.jobs.stages(job.id)["plan"]
    world.new_controller()
    world.steps(5)
    assert len(world.planner.asked) == 1
    assert world.store.jobs.stages(job.id)["plan"] == plan
    world.end(job, how="died", signal=9)
    world.steps(14)
    assert len(world.runner.started) == 2
    assert world.runner.started[1].policy == world.runner.started[0].policy
    assert len(world.planner.asked) == 1


def test_a_second_controller_waits_for_the_first_to_be_silent(world: World) -> None:
    first = world.controller
    world.steps(1)
    second = world.new_controller()
    world.now -= world.config.lease_s  # the first one is alive
    assert second.step() is False
    assert first.step() is True
    world.now += 9
    assert second.step() is False
    world.now += 2
    assert second.step() is True
    assert first.step() is False


def test_a_controller_that_resigns_is_followed_at_once(world: World) -> None:
    world.steps(1)
    first = world.controller
    first.resign()
    second = world.new_controller()
    world.now -= world.config.lease_s
    assert second.step() is True
    assert first.step() is False


def test_a_stray_run_is_ended(world: World) -> None:
    job = world.submit()
    run = world.running(job)
    world.store.jobs.annotate(world.job(job), world.now, world.controller._desk.lease, claim="another")
    world.steps(1)
    assert run.phase is Phase.ENDED
