"""Who goes first among equals."""

from __future__ import annotations

from typing import Any

import pytest

from lazytrain.schedulers.placement import Question, Rules
from lazytrain.schedulers.placement.rank import costs, order, weights


def ask(make: Any, jobs: list[Any], **changes: Any) -> Question:
    return Question(
        now_s=changes.pop("now_s", 0.0),
        waiting=tuple(jobs),
        running=changes.pop("running", ()),
        nodes=(make.node("a", gpus=4),),
        **changes,
    )


def weigh(question: Question, jobs: list[Any]) -> dict[str, float]:
    return weights(question, jobs, costs(question, jobs))


def test_priority_before_run_time_before_age(make: Any) -> None:
    jobs = [
        make.job("long", hours=9),
        make.job("short", hours=1),
        make.job("younger", hours=9, submitted_s=1.0),
        make.job("urgent", hours=99, priority=51),
    ]
    question = ask(make, jobs, now_s=2.0)
    cost = costs(question, jobs)
    assert [job.id for job in order(jobs, weights(question, jobs, cost), cost)] == [
        "urgent",
        "short",
        "long",
        "younger",
    ]


def test_a_job_that_has_waited_counts_more(make: Any) -> None:
    old, new = make.job("old", submitted_s=0.0), make.job("new", submitted_s=7200.0, user="eve")
    weight = weigh(ask(make, [old, new], now_s=7200.0, rules=Rules(ageing_s=3600.0)), [old, new])
    assert weight["old"] == pytest.approx(3 * weight["new"])


def test_a_user_who_holds_or_used_more_counts_less(make: Any) -> None:
    jobs = [make.job("a", user="ada"), make.job("e", user="eve")]
    running = (make.running("r", "a", "0", user="ada"),)
    held = weigh(ask(make, jobs, running=running), jobs)
    assert held["e"] == pytest.approx(held["a"] * 2**0.5), "half of four GPUs is ada's due; she holds half of that"
    used = weigh(ask(make, jobs, used_gpu_s={"ada": 900.0, "eve": 100.0}), jobs)
    assert used["e"] == pytest.approx(used["a"] * 2**1.6)


@pytest.mark.parametrize("share", [0.5, 1.0, 2.0, 8.0])
def test_a_larger_share_never_lowers_a_weight(make: Any, share: float) -> None:
    jobs = [make.job("a1", user="ada"), make.job("a2", user="ada"), make.job("e", user="eve")]
    asked = {"running": (make.running("r", "a", "0", user="ada"),), "used_gpu_s": {"ada": 10.0, "eve": 10.0}}
    small = weigh(ask(make, jobs, rules=Rules(shares={"ada": share}), **asked), jobs)
    large = weigh(ask(make, jobs, rules=Rules(shares={"ada": share * 1.5}), **asked), jobs)
    assert large["a1"] > small["a1"] and large["a2"] > small["a2"] and large["e"] < small["e"]


def test_a_deadline_counts_while_it_can_be_met_and_is_near(make: Any) -> None:
    jobs = [
        make.job(name, user=name, deadline_s=hours * 3600.0)
        for name, hours in (("far", 9.0), ("near", 1.5), ("missed", 0.5))
    ]
    weight = weigh(ask(make, jobs), jobs)
    assert weight["near"] == pytest.approx(8 * weight["far"])
    assert weight["missed"] == pytest.approx(weight["far"])


def test_a_job_that_takes_the_memory_of_two_gpus_costs_twice_its_time(make: Any) -> None:
    jobs = [make.job("slim", host=25), make.job("wide", host=50)]
    cost = costs(ask(make, jobs), jobs)
    assert (cost["slim"], cost["wide"]) == (3600.0, 7200.0)
