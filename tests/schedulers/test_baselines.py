"""The fixed rules fit what they say they fit, and refuse with the resource that is short."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lazytrain.jobs.errors import DoesNotFit, InputError
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import lower
from lazytrain.schedulers.baselines import every_kth, every_layer, megatrain, shortages
from lazytrain.schedulers.costs import state_bytes
from lazytrain.schedulers.hardware import Budgets, HardwareProfile

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]


def test_megatrain_keeps_every_fourth_boundary_on_the_gpu(make_facts: Make) -> None:
    policy = megatrain(make_facts(10))
    assert [i for i, home in enumerate(policy.homes) if home == "gpu"] == [0, 4, 8, 10]
    assert policy.count_homes() == {"gpu": 4, "host": 0, "nvme": 0, "recompute": 7}
    assert megatrain(make_facts(10), interval=1).count_homes()["recompute"] == 0
    with pytest.raises(InputError):
        megatrain(make_facts(10), interval=0)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_layer_moves_to_the_host_just_as_many_as_the_gpu_cannot_hold(
    make_facts: Make, make_profile: Machine, accumulation: int
) -> None:
    facts, profile = make_facts(20, workspace=4 * MIB), make_profile()
    peak = lower(every_layer(facts, profile, accumulation=accumulation), facts).peak_bytes("gpu")
    kept = 21
    for gpu in range(peak, peak - 17 * MIB, -MIB):
        policy = every_layer(facts, profile, gpu_memory=gpu, accumulation=accumulation)
        assert policy.accumulation == accumulation and policy.hardware_digest == profile.digest
        assert lower(policy, facts).peak_bytes("gpu") <= gpu
        homes = policy.homes
        assert set(homes) <= {"gpu", "host"} and list(homes) == sorted(homes, reverse=True)  # the earliest leave
        assert homes.count("gpu") <= kept
        kept = homes.count("gpu")
    assert kept < 10


def test_every_layer_without_a_machine_keeps_all_boundaries_on_the_gpu(make_facts: Make) -> None:
    policy = every_layer(make_facts(5), accumulation=2)
    assert set(policy.homes) == {"gpu"} and policy.accumulation == 2
    with pytest.raises(InputError, match="of a machine"):
        every_layer(make_facts(5), gpu_memory="1GB")


def test_every_layer_goes_on_to_nvme_when_the_host_is_full(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(20), make_profile()
    host = sum(state_bytes(facts).values()) + 9 * MIB
    policy = every_layer(facts, profile, gpu_memory=22 * MIB, host_memory=host, nvme=100 * MIB)
    count = policy.count_homes()
    assert count["nvme"] and count["host"] and count["gpu"]
    assert list(policy.homes) == sorted(policy.homes, key=("nvme", "host", "gpu").index)
    budgets = Budgets.of(profile, gpu_memory=22 * MIB, host_memory=host, nvme=100 * MIB)
    assert shortages(policy, facts, budgets) == []


@pytest.mark.parametrize(
    "gpu,host,nvme,resource",
    [(8 * MIB, 1 << 30, 0, "gpu_memory"), (1 << 30, MIB, 0, "host_memory"), (22 * MIB, 0, 2 * MIB, "nvme")],
)
def test_what_does_not_fit_is_refused_by_resource(
    make_facts: Make, make_profile: Machine, gpu: int, host: int, nvme: int, resource: str
) -> None:
    facts, profile = make_facts(20), make_profile()
    host = host or sum(state_bytes(facts).values()) + 4 * MIB
    with pytest.raises(DoesNotFit) as caught:
        every_layer(facts, profile, gpu_memory=gpu, host_memory=host, nvme=nvme)
    (reason,) = caught.value.reasons
    assert reason["resource"] == resource
    assert reason["shortfall_bytes"] == reason["needed_bytes"] - reason["available_bytes"] > 0
    assert reason["hint"]


def test_longer_intervals_need_less(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(20), make_profile()
    budgets = Budgets.of(profile, gpu_memory=26 * MIB, host_memory=sum(state_bytes(facts).values()))
    with pytest.raises(DoesNotFit):
        every_kth(facts, profile, budgets, interval=1)
    policy = every_kth(facts, profile, budgets, interval=3)
    assert policy.count_homes() == {"gpu": 8, "host": 0, "nvme": 0, "recompute": 13}
    assert shortages(policy, facts, budgets) == []
