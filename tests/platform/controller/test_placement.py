"""Each promise about the queue, with the real placement, a fake clock and fake machines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import InputError
from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.cluster.runs import Phase
from lazytrain.platform.controller.rules import load_rules
from lazytrain.platform.controller.usage import faded, held_spans
from lazytrain.platform.store import Change
from lazytrain.schedulers.placement import Rules, decide

S = JobState
World = Any
HOUR = 3600.0


@pytest.fixture
def lab(world: World) -> World:
    """One H800, and real placement."""
    world.decide = decide
    world.planner.tokens = 100 * 10 * HOUR  # ten hours
    return world


def change_rules(lab: World, **changes: Any) -> None:
    lab.config = replace(lab.config, rules=replace(lab.config.rules, **changes))
    lab.new_controller()


def run_for(lab: World, seconds: float) -> None:
    """Let time go by while every run gives signs of life."""
    left = seconds
    while left > 0:
        for run in lab.runner.all.values():
            run.beat += 1
            run.phase = Phase.RUNNING if run.phase is Phase.STARTING else run.phase
        lab.steps(1, seconds=min(60.0, left))
        left -= 60.0


def test_nobody_types_a_wall_time_and_a_job_that_ends_before_is_let_pass(lab: World) -> None:
    """Backfill: the large job holds the node's only free place of ten hours from now; one of five hours runs before."""
    lab.add_machine("a", gpus=2)
    lab.planner.memory_bytes = 1200 << 30
    first = lab.submit()
    lab.running(first)
    assert "ends about" in next(e.sentence for e in lab.store.jobs.events(first.id) if e.state == "STARTING")
    large = lab.submit(priority=90)
    lab.steps(3)
    assert lab.job(large).reason == "host_memory"
    lab.planner.memory_bytes = 100 << 30
    lab.planner.tokens /= 2
    short = lab.submit(priority=10)
    lab.steps(3)
    assert lab.state(short) is S.STARTING
    assert lab.state(large) is S.QUEUED


def test_a_long_job_does_not_pass_the_one_for_which_the_place_is_kept(lab: World) -> None:
    lab.add_machine("a", gpus=2)
    lab.planner.memory_bytes = 1100 << 30
    lab.running(lab.submit())
    lab.planner.memory_bytes = 1500 << 30
    large = lab.submit(priority=90)
    lab.steps(3)
    lab.planner.memory_bytes = 900 << 30
    lab.planner.tokens *= 4
    long = lab.submit(priority=10)
    lab.steps(3)
    assert lab.job(long).reason == "reserved"
    assert f"held for {large.id}" in lab.job(long).sentence


def test_a_higher_priority_waits_for_the_minimum_run_time_and_then_preempts(lab: World) -> None:
    low = lab.submit(priority=10)
    lab.running(low)
    high = lab.submit(priority=90)
    run_for(lab, 20 * 60)
    assert (lab.state(low), lab.state(high)) == (S.RUNNING, S.QUEUED)
    run_for(lab, 15 * 60)
    assert (lab.state(low), lab.state(high)) == (S.QUEUED, S.RUNNING)
    assert lab.job(low).queued_at == low.queued_at  # it has not lost its turn
    near = lab.submit(priority=99)  # by less than the margin
    run_for(lab, 60 * 60)
    assert lab.state(near) is S.QUEUED


def test_a_job_starts_on_a_slow_gpu_and_moves_once_a_fast_one_is_free(lab: World) -> None:
    lab.add_machine("slow", "RTX3090")
    lab.planner.speeds = {"RTX3090": 25.0}
    first = lab.submit()
    lab.running(first)
    assert lab.job(first).node == "a"
    second = lab.submit()
    lab.running(second)
    assert lab.job(second).node == "slow"
    run_for(lab, HOUR)
    assert lab.state(second) is S.RUNNING
    lab.finish(first)
    run_for(lab, 5)
    third = lab.submit(priority=10)
    run_for(lab, 180)
    assert (lab.state(second), lab.job(second).node) == (S.RUNNING, "a")
    assert lab.job(second).preemptions == 0
    assert lab.job(third).node != "a"
    assert "moves to an H800 of a" in " ".join(e.sentence for e in lab.store.jobs.events(second.id))


def test_who_had_less_of_late_goes_first(lab: World) -> None:
    mine = lab.submit(user="ben")
    lab.running(mine)
    run_for(lab, 2 * HOUR)
    again, other = lab.submit(user="ben"), lab.submit(user="ada")
    lab.finish(mine)
    lab.steps(3)
    assert lab.state(other) is S.STARTING
    assert lab.state(again) is S.QUEUED
    assert lab.questions[-1].used_gpu_s["ben"] == pytest.approx(2 * HOUR, rel=0.05)
    lab.new_controller()  # derived from what happened: no restart forgets it
    lab.steps(2)
    assert lab.questions[-1].used_gpu_s["ben"] == pytest.approx(2 * HOUR, rel=0.05)


@pytest.mark.parametrize(("shares", "first"), [({}, "ada"), ({"ben": 8.0}, "ben")])
def test_a_users_weight_counts(lab: World, shares: dict[str, float], first: str) -> None:
    """Ben had the GPU twice as long as Ada; with eight times her weight, that is little."""
    change_rules(lab, shares=shares)
    for user, hours in (("ben", 2), ("ada", 1)):
        job = lab.submit(user=user)
        lab.running(job)
        run_for(lab, hours * HOUR)
        last = job
        if user == "ben":
            lab.finish(job)
            lab.steps(1)
    waiting = {user: lab.submit(user=user) for user in ("ada", "ben")}
    lab.finish(last)
    lab.steps(3)
    assert [user for user, job in waiting.items() if lab.state(job) is S.STARTING] == [first]


def test_a_quota_by_kind_of_gpu_whatever_name_the_lab_wrote(lab: World) -> None:
    lab.add_machine("a", "NVIDIA H800", gpus=4)
    change_rules(lab, quota={"*": {"H800": 1}, "ben": {"h800": 2}})
    ours = [lab.submit() for _ in range(2)]
    theirs = [lab.submit(user="ben") for _ in range(3)]
    lab.steps(4)
    assert sorted(lab.state(job).value for job in ours) == ["QUEUED", "STARTING"]
    assert sorted(lab.state(job).value for job in theirs) == ["QUEUED", "STARTING", "STARTING"]
    waits = next(job for job in ours if lab.state(job) is S.QUEUED)
    assert lab.job(waits).reason == "quota"


def test_a_deadline_that_can_still_be_met_goes_first(lab: World) -> None:
    running = lab.submit()
    lab.running(running)
    early = lab.submit()
    pressed = lab.submit(queue={"retries": 2, "deadline": lab.now + 12 * HOUR})
    lab.finish(running)
    lab.steps(3)
    assert lab.state(pressed) is S.STARTING
    assert lab.state(early) is S.QUEUED


def test_whoever_waits_for_long_gets_a_place_kept(lab: World) -> None:
    """Anti-starvation: small jobs of a higher priority arrive all the time, and the large one has its turn."""
    lab.add_machine("a", gpus=2)
    lab.planner.tokens = 100 * HOUR
    lab.planner.memory_bytes = 100 << 30
    small = [lab.submit(priority=80), lab.submit(priority=80)]
    lab.steps(4)
    lab.planner.memory_bytes = 2000 << 30
    large = lab.submit(priority=10)
    lab.steps(2)
    lab.planner.memory_bytes = 100 << 30
    waited = 0
    while lab.state(large) is S.QUEUED and waited < 30:
        following = [lab.submit(priority=80), lab.submit(priority=80)]
        lab.steps(2)
        for job in small:
            if lab.job(job).claim:
                lab.run(job).phase = Phase.RUNNING
        lab.steps(1)
        for job in small:
            if lab.state(job) is S.RUNNING:
                lab.finish(job)
        lab.steps(3, seconds=HOUR / 3)
        small = following
        waited += 1
    assert 20 <= waited <= 27
    assert lab.state(large) is S.STARTING


def test_what_waits_is_told_for_what(lab: World) -> None:
    lab.running(lab.submit())
    job = lab.submit()
    lab.steps(3)
    assert lab.job(job).reason == "gpu_busy"
    assert "waits for an H800: it is busy until about" in lab.job(job).sentence


def test_placement_is_not_asked_again_while_nothing_changes(lab: World) -> None:
    lab.running(lab.submit())
    lab.submit()
    lab.steps(4)
    asked = len(lab.questions)
    lab.steps(10)
    assert len(lab.questions) == asked
    lab.submit()
    lab.steps(3)
    assert len(lab.questions) > asked
    asked = len(lab.questions)
    lab.steps(3, seconds=31)
    assert len(lab.questions) >= asked + 3


# ---- who had the GPUs


def test_spans_of_holding_a_gpu() -> None:
    def happened(job: str, time: float, state: JobState) -> Change:
        return Change(job, "ada" if job < "m" else "ben", time, state)

    changes = [
        happened("a", 10, S.QUEUED),
        happened("b", 15, S.SUCCEEDED),  # it had begun before
        happened("a", 20, S.STARTING),
        happened("a", 25, S.RUNNING),
        happened("a", 40, S.PAUSED),
        happened("c", 50, S.STOPPED),  # it never ran
        happened("a", 60, S.STARTING),
        happened("z", 70, S.STARTING),
    ]
    spans = held_spans(changes, {"a": "ada", "z": "ben", "y": "ben"}, since=5, now=100)
    assert sorted(spans) == [("ada", 5, 15), ("ada", 20, 40), ("ada", 60, 100), ("ben", 5, 100), ("ben", 70, 100)]


def test_what_is_longer_ago_counts_less() -> None:
    recent, old = faded([("ada", 90, 100)], 100, 50)["ada"], faded([("ada", 40, 50)], 100, 50)["ada"]
    assert 9 < recent < 10
    assert old == pytest.approx(recent / 2)


# ---- the file


def test_rules_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("min_run_s: 10m\nshares: {ada: 2}\nquota: {'*': {H800: 2}}\n")
    found = load_rules(path, Rules(moving=True))
    assert (found.min_run_s, found.moving, found.share("ada")) == (600.0, True, 2.0)
    assert found.most_gpus("ben", "H800") == 2
    path.write_text("")
    assert load_rules(path, Rules()) == Rules()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("min_run: 10", "min_run"),
        ("quota: {ada: {H800: -1}}", "quota.ada.H800"),
        ("shares: {ada: 0}", "shares"),
        ("a: [", "cannot be read"),
        ("- 1", ""),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=what):
        load_rules(path, Rules())
