"""Full disks, folders that are gone, clocks that are set, and files that a job's user has damaged."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import DataError
from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform import artifacts
from lazytrain.platform.artifacts import JobFiles
from lazytrain.platform.cluster.runs import Outcome, Phase
from lazytrain.platform.controller import Controller
from lazytrain.platform.controller.failures import Failure, Tally, classify, judge
from lazytrain.platform.store import Store

S = JobState
World = Any
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/lab/out")
GONE = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/lab/out")
YEAR = 365 * 24 * 3600.0


def fails(error: BaseException) -> Callable[..., Any]:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise error

    return fail


# ---- disks and folders


def test_a_request_that_fails_keeps_no_other_waiting(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add_machine("b")
    ended, other = world.submit(), world.submit()
    world.running(ended)
    world.finish(ended)
    world.steps(1)
    monkeypatch.setattr(shutil, "rmtree", fails(PermissionError(errno.EACCES, "Permission denied", "model")))
    removal, stop = world.ask(ended, "remove", files=True), world.ask(other, "stop")
    world.steps(2)
    assert world.state(other) is S.STOPPED
    assert world.store.jobs.answer_to(stop) == ""
    assert "remove failed: [Errno 13] Permission denied" in world.store.jobs.answer_to(removal)


def test_a_run_whose_folder_is_gone_can_be_stopped(world: World) -> None:
    job = world.submit()
    run = world.running(job)
    world.runner.stop = fails(GONE)
    number = world.ask(job, "stop")
    world.steps(2)
    assert world.state(job) is S.STOPPING
    assert world.store.jobs.answer_to(number) == ""
    world.steps(4, seconds=40)
    assert world.state(job) is S.STOPPED
    assert run.outcome.signal == 9


def test_a_start_that_cannot_be_written_is_not_tried_in_every_step(world: World) -> None:
    start, world.runner.start = world.runner.start, fails(FULL)
    job = world.submit()
    world.steps(20)
    assert (world.state(job), world.job(job).attempt) == (S.QUEUED, 1)
    assert "No space left on device" in world.job(job).sentence
    assert (world.job(job).infra_failures, world.job(job).user_failures) == (0, 0)
    world.runner.start = start
    world.steps(2, seconds=400)
    assert (world.state(job), world.job(job).attempt) == (S.STARTING, 2)


def test_a_full_disk_is_nobodys_fault(world: World) -> None:
    said = "disk full: a checkpoint in /lab/out needs at least 9 bytes, 3 are available"
    outcome = Outcome(how="error", code="invalid_checkpoint", message=said, final=True)
    assert classify(outcome) is Failure.DISK_FULL
    assert judge(Failure.DISK_FULL, Tally(9, 9, 1, 2)).again
    job = world.submit(queue={"retries": 0})
    for _ in range(3):
        world.running(job)
        world.end(job, how="error", code="invalid_checkpoint", message=said, final=True, step=7)
        world.steps(2)
        assert world.state(job) is S.QUEUED
        world.steps(1, seconds=600)
    assert world.state(job) is S.STARTING
    assert world.job(job).outcome["step"] == 7


@pytest.mark.parametrize("where", ["claim", "rows"])
def test_a_full_disk_rejects_no_job(world: World, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.submit()
    with monkeypatch.context() as patched:
        if where == "claim":
            patched.setattr(artifacts, "write_json", fails(FULL))
        else:
            world.planner.answers["tiny"] = DataError(f"cannot keep tokenized rows in /tmp: {FULL}")
        world.steps(5)
        assert world.state(job) is S.QUEUED
        assert "No space left on device" in world.job(job).sentence
        assert len(world.planner.asked) <= 1  # not in every step
    world.planner.answers.clear()
    world.steps(3, seconds=31)
    assert world.state(job) is S.STARTING


def test_a_claim_that_was_cut_off_is_made_again(world: World) -> None:
    job = world.submit()
    half = Path(job.run_dir) / "..owner.4711"
    half.parent.mkdir(parents=True)
    half.touch()
    world.steps(3)
    assert world.state(job) is S.STARTING
    assert JobFiles(job.run_dir).belongs_to(job.id)


@pytest.mark.parametrize("content", ["[]", "{}", '{"batch": "many", "way": 7}', "[" * 100_000])
def test_a_damaged_answer_of_a_search_does_not_keep_a_job_from_its_end(world: World, content: str) -> None:
    job = world.submit()
    world.running(job)
    JobFiles(job.run_dir).batch.write_text(content)
    world.finish(job)
    world.steps(1)
    assert world.state(job) is S.SUCCEEDED


# ---- clocks


class Clocks:
    """A controller whose clock can be set, and whose time goes by all the same."""

    def __init__(self, world: World, name: str = "one") -> None:
        self.world, self.steady = world, 0.0
        self.controller = Controller(
            name,
            world.store,
            world.runner,
            world.planner,
            world._decide,
            world.config,
            world._clock,
            lambda: self.steady,
        )
        world.controller.resign()
        world.controller = self.controller

    def steps(self, count: int, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.steady += seconds
            self.world.steps(1, seconds)


def test_a_clock_that_jumps_ahead_kills_no_run(world: World) -> None:
    clocks, job, leaving = Clocks(world), world.submit(), world.submit()
    world.add_machine("b")
    world.running(job)
    run = world.run(leaving)
    run.phase, run.ignores_stop = Phase.RUNNING, True
    clocks.steps(1)
    world.ask(leaving, "stop")
    clocks.steps(2)
    world.now += YEAR
    clocks.steps(2)
    assert (world.state(job), world.state(leaving)) == (S.RUNNING, S.STOPPING)
    clocks.steps(4, seconds=50)  # and what has to be waited for is
    assert world.state(leaving) is S.STOPPED


def test_a_clock_that_is_set_back_keeps_nobody_from_leading(world: World) -> None:
    first = Clocks(world, "one")
    first.steps(1)
    world.now -= YEAR
    second = Clocks(world, "two")
    with_lease = Store(world.store.url)  # as if "one" had been killed: its lease has a year to go
    with_lease.leases.take("controller", "one", world.now + YEAR, 10.0)
    with_lease.close()
    assert not second.controller.step()
    second.steady += 5.0
    assert not second.controller.step()
    second.steady += 6.0
    assert second.controller.step()


def test_a_leader_with_another_clock_is_left_in_peace(world: World) -> None:
    second = Clocks(world, "two")
    for _ in range(10):
        world.now, second.steady = world.now + 5.0, second.steady + 5.0
        world.store.leases.take("controller", "one", world.now + YEAR, 10.0)
        assert not second.controller.step()


def test_a_leader_says_that_it_lives_although_its_clock_was_set_back(world: World) -> None:
    clocks = Clocks(world)
    clocks.steps(1)
    before = world.store.leases.holder("controller", 0.0)
    world.now -= YEAR
    clocks.steps(5)
    assert world.store.leases.holder("controller", 0.0) != before


def test_times_of_a_clock_that_was_ahead_keep_no_job_waiting(world: World) -> None:
    world.now += 14 * YEAR
    early, failed = world.submit(), world.submit()
    world.add_machine("b")
    world.running(early)
    world.end(failed, how="error", message="unexpected KeyError: 'x'", exit_code=1)
    world.steps(1)
    assert world.job(failed).not_before > world.now
    world.now -= 14 * YEAR
    clocks, late = Clocks(world), world.submit(user="ben")
    world.add_machine("c")
    clocks.steps(4)
    assert (world.state(failed), world.state(late)) == (S.STARTING, S.STARTING)
