"""From the planner's answers to what placement chooses among."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.options import Planned, options
from lazytrain.schedulers.planner import plan

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]


def answer(facts: ModelFacts, profile: HardwareProfile, planner: str = "every_layer") -> Planned:
    return facts, plan(facts, profile, planner=planner, solve_seconds=2)


def test_one_option_per_kind_that_fits_and_words_for_the_rest(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(4)
    machines = {"large": make_profile(kind="large"), "small": make_profile(kind="small", host_memory_bytes=8 * MIB)}
    found = options(1e6, machines, partial(answer, facts), startup_s=30.0)
    assert [option.kind for option in found.options] == ["large"]
    option = found.options[0]
    assert option.seconds == pytest.approx(30.0 + 1e6 / option.tokens_per_s)
    assert option.host_bytes > 8 * facts.parameters
    assert found.limits["small"].startswith("needs ")
    assert found.limits["small"].endswith("of host memory, has 8.0MiB")


def test_a_job_is_planned_for_its_part_of_the_host_memory_first(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(4)
    state = 9 * facts.parameters
    seen: list[int] = []

    def plan_on(profile: HardwareProfile) -> Planned:
        seen.append(profile.host_memory_bytes)
        return answer(facts, profile)

    for memory in (8 * state, 2 * state):
        options(1.0, {"k": make_profile(host_memory_bytes=memory)}, plan_on, gpus={"k": 4})
    assert seen == [2 * state, state // 2, 2 * state]
