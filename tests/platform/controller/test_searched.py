"""A job that leaves its batch open measures it before it trains, when it trains for long; the answer is frozen."""

from dataclasses import replace
from typing import Any

import pytest

from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.artifacts import JobFiles, write_json

S = JobState
World = Any
HOUR = 3600.0
FOUND = {
    "batch": 12,
    "steps": 80,
    "kind": "H800",
    "way": {
        "option": {"kind": "H800", "tokens_per_s": 150.0, "work_tokens": 1e6, "host_bytes": 1 << 30},
        "policy": {"found": "there"},
        "device": {"kind": "cuda"},
    },
    "trials": [{"batch": 8, "fits": True, "tokens_per_s": 100.0}, {"batch": 12, "fits": True, "tokens_per_s": 150.0}],
}


@pytest.fixture
def long(world: World) -> World:
    """Jobs of ten hours."""
    world.planner.tokens = 100 * 10 * HOUR
    return world


def found(world: World, job: Any) -> None:
    """The run has measured and begun to train."""
    write_json(JobFiles(world.job(job).run_dir).batch, FOUND)
    run = world.run(job)
    run.step, run.doing, run.beat = 1, "", run.beat + 1


def test_the_batch_is_measured_shown_and_frozen(long: World) -> None:
    job = long.submit()
    run = long.running(job)
    assert run.order.search["kind"] == "H800"
    run.doing = "batch 8 fits, 100 tokens/s"
    long.steps(1)
    assert long.job(job).reason == "searching_batch"
    assert long.job(job).sentence == "measures batches on a before it trains: batch 8 fits, 100 tokens/s"
    found(long, job)
    long.steps(1)
    assert (long.job(job).reason, long.job(job).sentence) == ("running", "trains on a")
    stages = long.store.jobs.stages(job.id)
    assert stages["batch"] == {name: FOUND[name] for name in ("batch", "steps", "kind", "trials")}
    assert stages["plan"]["ways"]["H800"]["policy"] == {"found": "there"}
    long.end(job, how="died", message="gone")
    long.steps(6, seconds=60.0)
    assert long.run(job).order.search == {}
    assert long.run(job).order.spec["train"]["batch"] == 12


def test_what_ends_soon_fixed_its_batch_or_failed_before_is_not_measured(long: World) -> None:
    fixed = long.submit(train={"batch": 4})
    assert long.running(fixed).order.search == {}
    long.finish(fixed)
    failed = long.submit()
    assert long.running(failed).order.search
    long.end(failed, how="died", message="the measuring process died", exit_code=1)
    long.steps(3, seconds=40.0)
    assert long.running(failed).order.search == {}
    long.finish(failed)
    long.planner.tokens = 100 * 60.0
    short = long.submit()
    assert long.running(short).order.search == {}


def test_a_lab_can_do_without(long: World) -> None:
    long.config = replace(long.config, search_batch=False)
    long.new_controller()
    assert long.running(long.submit()).order.search == {}
