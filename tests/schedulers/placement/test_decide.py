"""One decision at a time: who starts where, who makes room, and what the others are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lazytrain.schedulers.placement import Decisions, Gpu, Question, Rules, Wait, WaitCode, decide

HOUR = 3600.0


def ask(nodes: list[Any], waiting: list[Any], running: list[Any] | None = None, **changes: Any) -> Question:
    return Question(
        now_s=changes.pop("now_s", 0.0),
        waiting=tuple(waiting),
        running=tuple(running or ()),
        nodes=tuple(nodes),
        **changes,
    )


def where(decisions: Decisions) -> dict[str, str]:
    return {start.job: start.node for start in decisions.starts}


def wait(decisions: Decisions, job: str) -> Wait:
    return next(one for one in decisions.waits if one.job == job)


def test_each_job_goes_where_it_gains_most(make: Any) -> None:
    """One H800 and one 3090; the 27B gains tenfold from the H800, the other job runs equally fast on both."""
    either = make.job("either", hours=1)
    either = replace(either, options=(make.option("H800", hours=1), make.option("RTX3090", hours=1)))
    decisions = decide(ask([make.node("h"), make.node("r", "RTX3090")], [either, make.job("big", hours=1)]))
    assert where(decisions) == {"big": "h", "either": "r"}
    assert decisions.solver.status == "OPTIMAL"
    assert decisions.starts[0].words.startswith("starts on an H800 of h, ends about 01:00")


def test_waiting_for_a_faster_gpu_is_better_than_a_slow_one_now(make: Any) -> None:
    nodes = [make.node("h"), make.node("r", "RTX3090")]
    job = make.job("j", kinds=("H800", "RTX3090"), hours=5)
    soon = [make.running("x", "h", "0", remaining_s=HOUR)]
    decisions = decide(ask(nodes, [job], soon))
    told = wait(decisions, "j")
    assert (told.code, told.node, told.start_s, told.end_s) == (WaitCode.BETTER_LATER, "h", HOUR, 6 * HOUR)
    assert "an RTX3090 is free and would take until 02:00 on 3 January" in told.words
    assert "an H800, expected about 01:00, ends it about 06:00" in told.words
    late = [make.running("x", "h", "0", remaining_s=100 * HOUR)]
    assert where(decide(ask(nodes, [job], late))) == {"j": "r"}


def test_a_blocked_job_says_what_it_waits_for(make: Any) -> None:
    nodes = [make.node("h", gpus=2, host=500), make.node("r", "RTX3090", host=96)]
    running = [make.running("x", "h", "0"), make.running("y", "h", "1", remaining_s=2 * HOUR)]
    job = make.job("j", host=112, limits={"RTX3090": "needs 112GiB of host memory, has 96GiB"})
    told = wait(decide(ask(nodes, [job], running, rules=Rules(utc_offset_s=2 * HOUR))), "j")
    assert told.code == WaitCode.GPU_BUSY
    assert told.words == (
        "waits for an H800: both are busy until about 03:00; "
        "an RTX3090 cannot hold it: needs 112GiB of host memory, has 96GiB"
    )
    assert (told.start_s, told.node) == (HOUR, "h")


def test_memory_of_the_node_is_shared(make: Any) -> None:
    nodes = [make.node("h", gpus=3, host=100, nvme_bytes=50 << 30)]
    running = [make.running("x", "h", "0", host=60)]
    big, small = make.job("big", host=50), make.job("small", host=40)
    decisions = decide(ask(nodes, [big, small], running))
    assert where(decisions) == {"small": "h"}
    told = wait(decisions, "big")
    assert told.code == WaitCode.HOST_MEMORY
    assert "an H800 of h is free, but x and small leave 0B of its host memory and this job needs 50.0GiB" in told.words
    disk = make.job("disk", needs={"nvme_bytes": 40 << 30})
    held = make.running("x", "h", "0", needs={"nvme_bytes": 20 << 30})
    assert wait(decide(ask(nodes, [disk], [held])), "disk").code == WaitCode.NVME_SPACE


def test_hopeless_waits_are_told_apart(make: Any) -> None:
    nodes = [
        make.node("h", drained=True),
        make.node("e", excluded="three faults of GPU 0 since noon"),
        make.node("r", "RTX3090", host=96),
        make.node("b", "A100", cards=(Gpu(id="0", state="bad"),)),
    ]
    cases = {
        "closed": (make.job("closed"), WaitCode.CLOSED, "h is drained; e takes no jobs: three faults of GPU 0"),
        "bad": (make.job("bad", kinds=("H800",), nodes=("e",)), WaitCode.CLOSED, "three faults"),
        "large": (make.job("large", kinds=("RTX3090",), host=112), WaitCode.TOO_LARGE, "needs 112.0GiB of host memory"),
        "none": (make.job("none", kinds=("RTX3090",), nodes=("z",)), WaitCode.NO_NODE, "no node called z"),
        "plan": (make.job("plan"), WaitCode.NO_PLAN, "no plan fits it anywhere: an H800 needs 3TiB of GPU memory"),
        "after": (make.job("after", after=("plan", "gone")), WaitCode.DEPENDENCY, "waits for plan to end"),
    }
    jobs = [job for job, _, _ in cases.values()]
    jobs[4] = replace(jobs[4], options=(), limits={"H800": "needs 3TiB of GPU memory"})
    decisions = decide(ask(nodes, jobs))
    assert not decisions.starts
    for name, (_, code, words) in cases.items():
        told = wait(decisions, name)
        assert told.code == code, name
        assert words in told.words, told.words
        assert told.start_s is None


def test_a_job_follows_those_that_it_needs(make: Any) -> None:
    first, second = make.job("first", hours=2), make.job("second", hours=1, after=("first", "long gone"))
    decisions = decide(ask([make.node("h", gpus=2)], [second, first]))
    assert where(decisions) == {"first": "h"}
    assert (wait(decisions, "second").start_s, wait(decisions, "second").end_s) == (2 * HOUR, 3 * HOUR)


def test_a_user_stays_within_the_quota_of_a_kind(make: Any) -> None:
    nodes = [make.node("h", gpus=4), make.node("r", "RTX3090", gpus=1)]
    jobs = [make.job(f"a{i}", hours=i + 1) for i in range(3)] + [make.job("e", user="eve", hours=9)]
    decisions = decide(ask(nodes, jobs, rules=Rules(quota={"*": {"H800": 2}})))
    assert where(decisions) == {"a0": "h", "a1": "h", "e": "h"}
    told = wait(decisions, "a2")
    assert (told.code, told.start_s) == (WaitCode.QUOTA, HOUR)
    assert "ada already has the GPUs that one user may have at once: 2 H800" in told.words


def test_a_blocked_head_does_not_hold_back_jobs_that_cannot_use_its_gpu(make: Any) -> None:
    """U89: an H800 job waits; a 3090 job submitted later starts at once."""
    nodes = [make.node("h"), make.node("r", "RTX3090")]
    jobs = [make.job("first", submitted_s=-99.0), make.job("later", kinds=("RTX3090",))]
    decisions = decide(ask(nodes, jobs, [make.running("x", "h", "0")]))
    assert where(decisions) == {"later": "r"}


def test_a_higher_priority_goes_first_whenever_it_came(make: Any) -> None:
    """U89: priority 10 submitted after a priority 0 that was blocked."""
    jobs = [make.job("zero", priority=0, submitted_s=-999.0, hours=0.1), make.job("ten", priority=10, hours=50)]
    decisions = decide(ask([make.node("h")], jobs))
    assert where(decisions) == {"ten": "h"}
    assert wait(decisions, "zero").start_s == 50 * HOUR


def backfill(make: Any, **small: Any) -> Decisions:
    """A node of two GPUs where a job of high priority waits one hour for memory; a small job would fit now."""
    nodes = [make.node("h", gpus=2, host=100)]
    high = make.job("high", host=80, priority=90)
    return decide(ask(nodes, [high, make.job("small", **small)], [make.running("x", "h", "0", host=60)]))


def test_a_small_job_passes_only_if_it_is_no_hindrance(make: Any) -> None:
    assert where(backfill(make, hours=0.9, host=40)) == {"small": "h"}, "it ends before"
    assert where(backfill(make, hours=5, host=20)) == {"small": "h"}, "there is room for both"
    decisions = backfill(make, hours=5, host=40)
    told = wait(decisions, "small")
    assert not decisions.starts
    assert told.code == WaitCode.RESERVED
    assert "held for high, which has priority 90; this job would not end before that one starts about 01:00" in (
        told.words
    )


def test_an_overdue_job_keeps_its_place_against_any_priority(make: Any) -> None:
    nodes = [make.node("h", gpus=2, host=100)]
    running = [make.running("x", "h", "0", host=60)]
    old = make.job("old", host=80, priority=0, submitted_s=-25 * HOUR)
    new = make.job("new", host=30, hours=5, priority=90)
    told = wait(decide(ask(nodes, [old, new], running)), "new")
    assert told.code == WaitCode.RESERVED
    assert "held for old, which has waited for 25 h" in told.words
    young = replace(old, submitted_s=-23 * HOUR)
    assert where(decide(ask(nodes, [young, new], running))) == {"new": "h"}


def test_jobs_that_had_to_wait_hold_a_part_of_the_gpus_at_most(make: Any) -> None:
    """Four GPUs, of which a quarter is one: the next overdue job goes first only once that one has ended."""
    nodes = [make.node("h", gpus=4, host=400)]
    jobs = [make.job("old", hours=90, submitted_s=-30 * HOUR), make.job("new", user="eve")]
    others = [make.running(f"r{i}", "h", str(i)) for i in range(3)]
    assert where(decide(ask(nodes, jobs, others))) == {"old": "h"}
    others[0] = replace(others[0], waited_s=25 * HOUR)
    assert where(decide(ask(nodes, jobs, others))) == {"new": "h"}


def test_preemption_takes_the_lowest_that_has_run_long_enough(make: Any) -> None:
    nodes = [make.node("h", gpus=3, host=100)]
    running = [
        make.running("young", "h", "0", priority=0, started_s=-60.0),
        make.running("low", "h", "1", priority=10),
        make.running("near", "h", "2", priority=65),
    ]
    decisions = decide(ask(nodes, [make.job("high", priority=80)], running))
    assert [(p.job, p.for_job) for p in decisions.preempts] == [("low", "high")]
    assert "high has priority 80, this job 10" in decisions.preempts[0].words
    assert wait(decisions, "high").code == WaitCode.PREEMPTING
    assert not decide(ask(nodes, [make.job("mid", priority=29)], running)).preempts
    told = [replace(job, stopping=job.id == "low", remaining_s=5.0 if job.id == "low" else 9e9) for job in running]
    again = decide(ask(nodes, [make.job("high", priority=80)], told))
    assert not again.preempts, "one is already on its way out"
    assert wait(again, "high").code == WaitCode.PREEMPTING


def test_preemption_frees_memory_too_and_never_more_than_needed(make: Any) -> None:
    nodes = [make.node("h", gpus=3, host=100)]
    running = [make.running(f"r{i}", "h", str(i), host=host, priority=i) for i, host in enumerate((10, 30, 60))]
    decisions = decide(ask(nodes, [make.job("high", host=60, priority=90)], running))
    assert [p.job for p in decisions.preempts] == ["r2"]
    decisions = decide(ask(nodes, [make.job("high", host=85, priority=90)], running))
    assert sorted(p.job for p in decisions.preempts) == ["r1", "r2"]


def test_a_paused_job_makes_room_in_memory_for_anyone(make: Any) -> None:
    nodes = [make.node("h", host=100)]
    paused = make.running("paused", "h", None, host=60, priority=99, remaining_s=float("inf"))
    decisions = decide(ask(nodes, [make.job("j", host=50, priority=0)], [paused]))
    assert [(p.job, p.for_job) for p in decisions.preempts] == [("paused", "j")]
    assert "its state goes into a checkpoint" in decisions.preempts[0].words
    assert where(decide(ask(nodes, [make.job("j", host=40)], [paused]))) == {"j": "h"}


MOVING = Rules(moving=True)


def test_a_job_starts_on_an_idle_slow_gpu_and_moves_later(make: Any) -> None:
    nodes = [make.node("h"), make.node("r", "RTX3090")]
    job = make.job("j", kinds=("H800", "RTX3090"), hours=5)
    busy = make.running("x", "h", "0", remaining_s=4 * HOUR)
    assert where(decide(ask(nodes, [job], [busy], rules=MOVING))) == {"j": "r"}
    assert not decide(ask(nodes, [job], [replace(busy, remaining_s=60.0)], rules=MOVING)).starts, "not for a minute"
    there = make.running("j", "r", "0", kind="RTX3090", remaining_s=46 * HOUR, moves=job.options)
    decisions = decide(ask(nodes, [], [there], rules=MOVING))
    assert [(p.job, p.for_job) for p in decisions.preempts] == [("j", "j")]
    assert decisions.preempts[0].words == "moves to an H800 of h and ends about 05:00 instead of 22:00 tomorrow"
    assert not decide(ask(nodes, [], [replace(there, started_s=-60.0)], rules=MOVING)).preempts
    assert not decide(ask(nodes, [], [replace(there, remaining_s=5.5 * HOUR)], rules=MOVING)).preempts


def test_the_gpu_is_kept_for_a_job_that_moves(make: Any) -> None:
    nodes = [make.node("h"), make.node("r", "RTX3090")]
    leaving = make.running("j", "r", "0", kind="RTX3090", stopping=True, moves=(make.option("H800", hours=5),))
    decisions = decide(ask(nodes, [make.job("other")], [leaving], rules=MOVING))
    assert not decisions.starts
    assert not decisions.preempts


def test_streaming_jobs_get_pcie_roots_of_their_own(make: Any) -> None:
    cards = tuple(Gpu(id=str(i), pcie_root=str(i // 2)) for i in range(4))
    node = make.node("h", cards=cards, pcie_bytes_s=10.0)
    jobs = [make.job(name, needs={"h2d_bytes_s": 8.0}) for name in ("s1", "s2")] + [make.job("c1"), make.job("c2")]
    decisions = decide(ask([node], jobs))
    roots = {start.job: int(start.gpu) // 2 for start in decisions.starts}
    assert roots["s1"] != roots["s2"]
    assert all(start.speed == 1.0 for start in decisions.starts)


def test_streaming_jobs_go_where_copies_have_room_whatever_the_roots_give(make: Any) -> None:
    """Each of the GPUs has a root of its own; all of them together get half of what their roots could bring."""
    narrow = make.node("a", gpus=2, pcie_bytes_s=10.0, copies_bytes_s=10.0)
    wide = make.node("b", gpus=2, pcie_bytes_s=10.0)
    beside = [make.running(f"on {name}", name, "0", needs={"h2d_bytes_s": 8.0}) for name in ("a", "b")]
    decisions = decide(ask([narrow, wide], [make.job("s", needs={"d2h_bytes_s": 8.0})], beside))
    assert where(decisions) == {"s": "b"}
    assert decisions.starts[0].speed == 1.0


def test_neighbours_are_expected_to_slow_each_other(make: Any) -> None:
    node = make.node("h", gpus=2, dram_bytes_s=100.0)
    needs = {"dram_bytes_s": 75.0}
    jobs = [make.job("j", hours=1, needs=needs)]
    other = make.running("x", "h", "0", needs=needs, remaining_s=99 * HOUR)
    decisions = decide(ask([node], jobs, [other]))
    start = decisions.starts[0]
    assert start.speed == pytest.approx(2 / 3)
    assert start.end_s == pytest.approx(1.5 * HOUR)
    assert decisions.running_end_s["x"] == pytest.approx(99 * 1.5 * HOUR), "while they run side by side"
    assert "at 67 % of its speed" in start.words


def test_a_job_that_would_only_slow_others_waits(make: Any) -> None:
    node = make.node("h", gpus=2, dram_bytes_s=100.0)
    needs = {"dram_bytes_s": 100.0}
    other = make.running("x", "h", "0", needs=needs, remaining_s=0.2 * HOUR)
    told = wait(decide(ask([node], [make.job("j", hours=1, needs=needs)], [other])), "j")
    assert told.code == WaitCode.CROWDED
    assert "one more would only slow them down" in told.words


def test_a_deadline_that_is_missed_is_said(make: Any) -> None:
    late = make.job("late", hours=2, deadline_s=HOUR)
    decisions = decide(ask([make.node("h")], [late]))
    assert "too late for its deadline about 01:00" in decisions.starts[0].words
    told = wait(decide(ask([make.node("h")], [late], [make.running("x", "h", "0")])), "late")
    assert "expected to end about 03:00, after its deadline" in told.words


def test_the_order_of_the_lists_changes_nothing(make: Any) -> None:
    nodes = [make.node("h", gpus=2), make.node("r", "RTX3090", gpus=2)]
    jobs = [make.job(f"j{i}", kinds=("H800", "RTX3090"), hours=i % 3 + 1, user=f"u{i % 2}") for i in range(9)]
    first, second = decide(ask(nodes, jobs)), decide(ask(nodes, jobs[::-1]))
    assert first.starts == second.starts
    assert {one.job: one for one in first.waits} == {one.job: one for one in second.waits}


def test_without_time_the_greedy_rule_decides(make: Any) -> None:
    decisions = decide(ask([make.node("h")], [make.job("j")]), seconds=0.0)
    assert (where(decisions), decisions.solver.status) == ({"j": "h"}, "FALLBACK")


def test_an_empty_queue(make: Any) -> None:
    decisions = decide(ask([make.node("h")], []))
    assert (decisions.starts, decisions.waits, decisions.solver.status) == ((), (), "NOTHING")
