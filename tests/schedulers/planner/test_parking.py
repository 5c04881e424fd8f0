"""Optimizer state and gradients on NVMe: what parking gives back, and which one is the quickest that gives enough."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.optimizer_bytes import DEFAULT_OPTIMIZER
from lazytrain.jobs.policy import Policy
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.planner.parking import (
    NOTHING,
    Parking,
    most_spared_bytes,
    park,
    parkable,
    quickest_parking,
    spared_bytes,
)
from lazytrain.schedulers.simulator import simulate

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]


def plain(facts: ModelFacts, accumulation: int = 1) -> Policy:
    return Policy.from_homes(facts, ["gpu"] * (len(facts.layers) + 1), accumulation=accumulation)


def test_the_last_layers_are_parked(make_facts: Make) -> None:
    facts = make_facts(6)
    policy = park(plain(facts), facts, Parking(4, 2))
    assert [layer.optimizer_home for layer in policy.layers] == ["host"] * 2 + ["nvme"] * 4
    assert [layer.gradient_home for layer in policy.layers] == ["host"] * 4 + ["nvme"] * 2
    assert Parking.of(policy, facts) == Parking(4, 2)
    assert park(plain(facts), facts, NOTHING) == plain(facts)


def test_three_layers_of_a_kind_only_fill_its_buffers(make_facts: Make) -> None:
    facts = make_facts(8)
    state, gradient = (sizes[0] for sizes in parkable(facts, DEFAULT_OPTIMIZER))
    assert spared_bytes(plain(facts), facts, Parking(3, 3)) == pytest.approx(0, abs=16)
    assert spared_bytes(plain(facts), facts, Parking(5, 4)) == pytest.approx(2 * state + gradient, abs=16)
    everything = most_spared_bytes(parkable(facts, DEFAULT_OPTIMIZER))
    assert everything == pytest.approx(spared_bytes(plain(facts), facts, Parking(8, 8)), abs=16)


def test_one_kind_is_parked_where_it_is_enough(make_facts: Make, make_profile: Machine) -> None:
    """The other's buffers are spared; gradients have the smaller ones."""
    facts = make_facts(12)
    state, gradient = (sizes[0] for sizes in parkable(facts, DEFAULT_OPTIMIZER))
    assert quickest_parking(plain(facts), facts, make_profile(), 2 * state) == Parking(0, 8)
    assert quickest_parking(plain(facts), facts, make_profile(), 7 * state - 32) == Parking(10, 0)
    many = quickest_parking(plain(facts), facts, make_profile(), 9 * state + 2 * gradient - 32)
    assert many == Parking(12, 5)
    assert quickest_parking(plain(facts), facts, make_profile(), 9 * state + 10 * gradient) is None
    assert quickest_parking(plain(facts), facts, make_profile(), 0) == NOTHING


@pytest.mark.parametrize("seed", range(8))
def test_no_other_parking_that_is_enough_is_much_quicker(make_facts: Make, make_profile: Machine, seed: int) -> None:
    """Against all of them in the simulator: disks that write slower than they read want gradients parked too."""
    choose = random.Random(seed)
    facts = make_facts(6, flops=choose.choice((1e8, 1e9, 1e10)), parameters=choose.choice((1, 2)) * MIB)
    rates = {name: choose.choice((2e7, 1e8, 4e8)) for name in ("nvme_read_bytes_s", "nvme_write_bytes_s")}
    profile, policy = make_profile(**rates), plain(facts, choose.choice((1, 1, 2)))
    sizes = parkable(facts, policy.optimizer, policy.accumulation)
    missing = int(choose.uniform(0.1, 0.9) * most_spared_bytes(sizes))
    found = quickest_parking(policy, facts, profile, missing)
    assert found is not None and spared_bytes(policy, facts, found) >= missing - 16

    def step_s(parking: Parking) -> float:
        return simulate(park(policy, facts, parking), facts, profile).step_s

    enough = [
        parking
        for parking in itertools.starmap(Parking, itertools.product(range(7), repeat=2))
        if spared_bytes(policy, facts, parking) >= missing
    ]
    assert step_s(found) <= 1.1 * min(map(step_s, enough))
