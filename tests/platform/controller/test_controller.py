"""The life of jobs under one controller, step by step."""

from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import DataError, DoesNotFit, HardwareError, LazytrainError, Unreachable
from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.artifacts import JobFiles
from lazytrain.platform.cluster.runs import Phase

S = JobState
World = Any


def states(world: World, job: Any) -> list[str]:
    return [event.state for event in world.store.jobs.events(job.id) if event.kind == "state"]


def test_a_good_job_runs_once_and_succeeds(world: World) -> None:
    job = world.submit()
    run = world.running(job)
    assert run.order.spec["train"]["batch"] == 8
    assert run.order.spec["output"]["dir"] == job.run_dir
    assert run.order.node == "a"
    world.finish(job)
    world.steps(3)
    assert states(world, job) == ["QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]
    assert "100 steps" in world.job(job).sentence
    assert len(world.runner.started) == 1


def test_a_run_that_ends_before_anybody_looks(world: World) -> None:
    job = world.submit()
    world.steps(3)
    world.finish(job)
    world.steps(1)
    assert states(world, job) == ["QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]


@pytest.mark.parametrize("missing", ["record", "model", "steps", "loss", "owner", "other"])
def test_no_success_without_a_verified_result(world: World, missing: str) -> None:
    job = world.submit(queue={"retries": 0})
    world.running(job)
    world.finish(job, steps=0 if missing == "steps" else 100)
    files = JobFiles(job.run_dir)
    if missing == "record":
        files.result.unlink()
    elif missing == "model":
        (files.model / "model.safetensors").unlink()
    elif missing == "owner":
        files.owner.unlink()
    elif missing == "loss":
        files.result.write_text('{"status": "done", "steps": 100, "loss": null}')
        world.end(job, how="done", result={"status": "done", "steps": 100, "loss": None})
    elif missing == "other":
        files.result.write_text('{"status": "done", "steps": 100, "loss": 0.1}')
    world.steps(2)
    assert world.state(job) is S.FAILED
    assert "the run" in world.job(job).sentence


def test_an_impossible_job_is_rejected_with_the_planners_reasons(world: World) -> None:
    reason = {
        "resource": "host_memory",
        "needed_bytes": 200 << 30,
        "available_bytes": 96 << 30,
        "shortfall_bytes": 104 << 30,
        "hint": "more host memory",
    }
    world.planner.answers["big"] = world_admission(world).model_copy(
        update={"ways": {}, "limits": {"H800": "needs 200GiB of host memory, has 96GiB"}, "reasons": (reason,)}
    )
    job = world.submit("big")
    world.steps(3)
    assert world.state(job) is S.REJECTED
    assert world.job(job).reason == "does_not_fit"
    assert "H800 needs 200GiB of host memory, has 96GiB; more host memory" in world.job(job).sentence
    assert world.job(job).outcome["reasons"] == [reason]
    assert world.runner.started == []


def test_what_planning_noted_is_told(world: World) -> None:
    note = "sequences are longer than the model is for"
    world.planner.notes = (note,)
    job = world.submit()
    world.steps(3)
    (told,) = [event for event in world.store.jobs.events(job.id) if event.reason == "planned"]
    assert told.sentence == f"is planned and waits for its turn; {note}"


def world_admission(world: World) -> Any:
    from lazytrain.platform.admission import Admission

    return Admission(batch=8, steps=100, ways={}, limits={})


@pytest.mark.parametrize(
    "error", [DataError("no row of x.jsonl is usable", hint="look at line 3"), DoesNotFit("no plan fits")]
)
def test_bad_input_is_rejected_before_anything_starts(world: World, error: LazytrainError) -> None:
    world.planner.answers["bad"] = error
    job = world.submit("bad")
    good = world.submit("good")
    world.steps(3)
    assert world.state(job) is S.REJECTED
    assert world.job(job).reason == error.code
    assert error.message in world.job(job).sentence
    assert world.state(good) is S.STARTING


def test_a_job_that_nobody_can_measure_now_waits_and_is_asked_about_again(world: World) -> None:
    world.planner.answers["good"] = Unreachable("no node that trains is there")
    job = world.submit("good")
    world.steps(2)
    assert world.state(job) is S.QUEUED
    assert world.job(job).sentence == "waits to be planned: no node that trains is there"
    del world.planner.answers["good"]
    world.steps(3)
    assert world.state(job) is S.QUEUED  # not in every step
    world.steps(3, seconds=30)
    assert world.state(job) is S.STARTING


def test_a_directory_that_is_somebody_elses_is_refused(world: World) -> None:
    job = world.submit()
    Path(job.run_dir).mkdir(parents=True)
    (Path(job.run_dir) / "thesis.txt").touch()
    world.steps(2)
    assert world.state(job) is S.REJECTED
    assert "not empty" in world.job(job).sentence


def test_a_job_waits_in_words(world: World) -> None:
    first, second = world.submit(), world.submit(resources={"gpu": ["H800"]})
    other = world.submit(resources={"gpu": ["RTX 3090"]})
    world.steps(3)
    assert world.state(first) is S.STARTING
    assert (world.job(second).reason, world.job(second).sentence) == ("gpu_busy", "waits: gpu_busy")
    assert world.job(other).sentence == "waits for a node with RTX 3090: there is none now"
    world.add_machine("b", "NVIDIA GeForce RTX 3090")
    world.steps(4)
    assert world.state(other) is S.STARTING
    assert world.job(other).node == "b"
    notes = [event for event in world.store.jobs.events(second.id) if event.kind == "note"]
    assert [event.reason for event in notes] == ["planned", "gpu_busy"]  # told once, not in every step


def test_a_node_of_a_new_kind_is_planned_for_with_the_same_batch(world: World) -> None:
    first, second = world.submit(), world.submit()
    world.steps(3)
    world.add_machine("b", "RTX3090")
    world.steps(4)
    assert world.state(second) is S.STARTING
    (later,) = [order for order in world.planner.asked if order.job == second.id and "RTX3090" in order.profiles]
    assert later.batch == 8
    assert set(later.profiles) == {"RTX3090"}
    assert world.state(first) is S.STARTING


def test_a_drained_node_takes_nothing_new_and_keeps_what_runs(world: World) -> None:
    job = world.submit()
    world.running(job)
    world.store.nodes.drain("a", True, "new disk")
    second = world.submit()
    world.finish(job)
    world.steps(4)
    assert world.state(job) is S.SUCCEEDED
    assert world.state(second) is S.QUEUED
    world.store.nodes.drain("a", False)
    world.steps(2)
    assert world.state(second) is S.STARTING


def test_a_node_that_cannot_be_measured_takes_no_job(world: World) -> None:
    world.runner.profiles["a"] = HardwareError("the GPU is busy")
    job = world.submit()
    world.steps(3)
    assert world.state(job) is S.QUEUED
    assert "the GPU is busy" in world.store.nodes.get("a").reason


def test_a_job_after_another(world: World) -> None:
    world.add_machine("b")
    first = world.submit()
    second = world.submit(after=(first.id,))
    world.running(first)
    assert world.job(second).reason == "dependency"
    world.ask(first, "stop")
    world.steps(3)
    assert world.state(first) is S.STOPPED
    assert world.state(second) is S.REJECTED
    assert first.id in world.job(second).sentence


def test_a_job_after_one_that_is_paused_or_not_planned_waits_and_then_runs(world: World) -> None:
    world.add_machine("b")
    world.planner.silent = {"slow"}
    first = world.submit("slow")
    second = world.submit(after=(first.id,))
    world.steps(3)
    assert (world.state(first), world.state(second)) == (S.QUEUED, S.QUEUED)
    assert world.job(second).sentence == f"waits for {first.id} to succeed"
    world.planner.silent = set()
    world.running(first)
    world.ask(first, "pause")
    world.steps(4)
    assert (world.state(first), world.state(second)) == (S.PAUSED, S.QUEUED)
    world.ask(first, "resume")
    world.running(first)
    world.finish(first)
    world.steps(4)
    assert world.state(second) is S.STARTING


def test_a_higher_priority_preempts_and_both_end_well(world: World) -> None:
    low = world.submit(priority=10)
    world.running(low)
    high = world.submit(priority=90)
    world.steps(5)
    assert world.state(high) is S.STARTING
    assert world.state(low) is S.QUEUED
    assert states(world, low) == ["QUEUED", "STARTING", "RUNNING", "PAUSING", "PAUSED", "QUEUED"]
    assert world.job(low).preemptions == 1
    world.finish(high)
    world.steps(3)
    assert world.state(low) is S.STARTING
    assert world.job(low).attempt == 2
    world.run(low).phase = Phase.RUNNING
    world.finish(low)
    world.steps(2)
    assert (world.state(low), world.state(high)) == (S.SUCCEEDED, S.SUCCEEDED)


def test_machines_that_cannot_be_reached_cost_nothing(world: World) -> None:
    job = world.submit()
    world.running(job)
    world.runner.down = True
    waiting = world.submit()
    world.steps(50)
    assert world.state(job) is S.RUNNING
    assert world.state(waiting) is S.QUEUED
    world.runner.down = False
    world.finish(job)
    world.steps(4)
    assert world.state(job) is S.SUCCEEDED
    assert world.state(waiting) is S.STARTING


def test_what_is_wrong_with_one_job_does_not_stop_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add_machine("b")
    broken, good = world.submit(), world.submit()
    world.running(good)
    look = world.runner.look

    def fail(claim: str, *rest: Any) -> Any:
        if claim.startswith(broken.id):
            raise ZeroDivisionError
        return look(claim, *rest)

    monkeypatch.setattr(world.runner, "look", fail)
    world.finish(good)
    world.steps(2)
    assert world.state(good) is S.SUCCEEDED
    assert not world.state(broken).final


def test_a_step_does_not_take_longer_the_more_jobs_wait(world: World) -> None:
    """What is left has its turn in the next steps."""
    world.steps(2)
    jobs = [world.submit() for _ in range(60)]
    world.tick = 0.01
    world.controller.step()
    first = len(world.planner.asked)
    world.controller.step()
    assert 0 < first < len(world.planner.asked) < len(jobs)
    for _ in range(30):
        world.controller.step()
    assert len(world.planner.asked) == len(jobs)
    assert {world.job(job).reason for job in jobs} == {"starting", "gpu_busy"}
