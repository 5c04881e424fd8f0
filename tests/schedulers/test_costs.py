"""Seconds and bytes of operations, against numbers worked out by hand on the round machine (1e12 op/s, 1e9 bytes/s)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.optimizer_bytes import OptimizerOptions
from lazytrain.jobs.policy import Policy, Program, lower, lower_forward
from lazytrain.jobs.policy.artifact import Home
from lazytrain.jobs.policy.parked import parked_state_bytes
from lazytrain.schedulers.costs import (
    backward_forwards,
    forward_seconds,
    host_bytes,
    layer_forwards,
    op_seconds,
    staging_bytes,
    state_bytes,
)
from lazytrain.schedulers.hardware import HardwareProfile

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]


def seconds(program: Program, facts: ModelFacts, profile: HardwareProfile) -> dict[str, float]:
    return {op.id: op_seconds(op, facts, profile) for op in program.ops}


def test_seconds_of_every_kind_of_operation(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(4)
    profile = make_profile(d2h_bytes_s=2e9, nvme_write_bytes_s=4e9, nvme_read_bytes_s=8e9)
    program = lower(Policy.from_homes(facts, ["gpu", "nvme", "recompute", "host", "gpu"], accumulation=2), facts)
    took = seconds(program, facts, profile)
    assert {op.kind for op in program.ops} == {
        *("update", "load", "forward", "offload", "write", "loss", "read", "reload"),
        *("recompute", "backward", "gradient", "accumulate", "norm", "clip"),
    }
    weights, boundary, forward = 2 * MIB, MIB, 1e-3
    assert took["load.1@0"] == weights / 1e9
    assert took["reload.1@0"] == boundary / 1e9
    assert took["gradient.1@0"] == weights / 2e9
    assert took["offload.3@0"] == boundary / 2e9
    assert took["write.1@0"] == boundary / 4e9
    assert took["read.1@0"] == boundary / 8e9
    assert took["forward.1@0"] == took["recompute.1@0"] == forward
    assert took["backward.1@0"] == 3 * forward  # re-forward and twice that for backward
    assert took["loss.lm_head@0"] == 3 * forward  # the head makes its gradients with the loss ...
    assert took["backward.lm_head@0"] == 0.0  # ... and only scales them afterwards
    assert took["update.1"] == MIB / 1e9
    assert took["norm.1"] == weights / 1e10
    assert took["accumulate.1@1"] == 3 * weights / 1e10
    assert took["clip"] == 0.0


def test_attention_takes_its_own_time(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(2), make_profile(attention_flops={"bfloat16": 1e11, "float32": 1e11})
    layer = facts.layers[0].model_copy(update={"attention_flops": facts.layers[0].forward_flops / 4})
    assert forward_seconds(layer, facts, profile) == pytest.approx(0.75e-3 + 0.25e-2)


@pytest.mark.parametrize(
    "parameters,frozen,forwards", [(1000, 0, 2.0), (1000, 1000, 1.0), (1000, 500, 1.5), (0, 0, 1.0)]
)
def test_what_does_not_learn_has_only_its_inputs_gradient_to_make(
    make_facts: Make, make_profile: Machine, parameters: int, frozen: int, forwards: float
) -> None:
    """A unit without parameters, as an activation between layers is, has nothing that learns."""
    unit = make_facts(1).layers[0].model_copy(update={"parameters": parameters, "frozen_parameters": frozen})
    assert backward_forwards(unit, make_profile()) == forwards


def test_evaluation_runs_the_head_once_and_overhead_counts_per_operation(
    make_facts: Make, make_profile: Machine
) -> None:
    facts = make_facts(2)
    took = seconds(lower_forward(facts), facts, make_profile(operation_overhead_s=0.25, efficiency=0.5))
    assert took["forward.lm_head@0"] == 0.25 + 2e-3
    assert took["forward.embed@0"] == 0.25
    assert took["load.0@0"] == 2 * MIB / 1e9


@pytest.mark.parametrize(
    "homes,units",
    [
        (["gpu"] * 5, 4.0),
        (["gpu", "recompute", "gpu", "host", "gpu"], 4.25),
        (["gpu", *["recompute"] * 3, "gpu"], 4.75),
    ],
)
def test_compute_units_count_re_forwards(
    make_facts: Make, make_profile: Machine, homes: list[str], units: float
) -> None:
    facts = make_facts(4)
    policy = Policy.from_homes(facts, homes, accumulation=2)  # type: ignore[arg-type]
    assert layer_forwards(lower(policy, facts), facts, make_profile()) == units


def test_host_table_in_bfloat16_is_8_03_bytes_per_parameter(make_facts: Make) -> None:
    facts = make_facts(4)
    table = host_bytes(facts, Policy.from_homes(facts, ["gpu", "host", "host", "nvme", "gpu"]))
    per_parameter = {name: table[name] / facts.parameters for name in state_bytes(facts)}
    assert per_parameter == pytest.approx(
        {"weights": 2, "master": 2, "optimizer_state": 2.03125, "gradients": 2}, rel=1e-6
    )
    assert table["activations"] == 2 * MIB
    assert table["staging"] == 2 * MIB  # two buffers for what goes on to NVMe and comes back


def test_what_is_parked_on_nvme_leaves_the_host_table_but_for_its_rings(make_facts: Make) -> None:
    facts = make_facts(6)
    policy = Policy.from_homes(facts, ["gpu"] * 7)
    parked = policy.parked(optimizer=[2, 3, 4, 5], gradients=[5])
    before, after = host_bytes(facts, policy), host_bytes(facts, parked)
    layer = facts.layers[0].parameters
    assert before["weights"] == after["weights"]
    assert before["master"] - after["master"] == 4 * 2 * layer
    assert before["optimizer_state"] - after["optimizer_state"] == pytest.approx(4 * 2.03125 * layer, abs=2)
    assert before["gradients"] - after["gradients"] == 2 * layer
    assert after["staging"] - before["staging"] == pytest.approx(3 * 4.03125 * layer + 2 * layer, abs=4)


def test_reads_and_writes_of_what_is_parked_take_the_disks_time(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(4), make_profile(nvme_write_bytes_s=4e9, nvme_read_bytes_s=8e9)
    policy = Policy.from_homes(facts, ["gpu"] * 5).parked(optimizer=[1], gradients=[2])
    rates = {"read": profile.nvme_read_bytes_s, "write": profile.nvme_write_bytes_s}
    ops = [op for op in lower(policy, facts).ops if op.stream in ("nvme_read", "nvme_write")]
    assert sorted(op.kind for op in ops) == ["read_gradient", "read_state", "write_gradient", "write_state"]
    for op in ops:
        assert op_seconds(op, facts, profile) == op.bytes / rates[op.stream.removeprefix("nvme_")]


def test_rings_of_pinned_slabs_count_where_not_all_can_be_pinned(make_facts: Make) -> None:
    facts = make_facts(4)
    policy = Policy.from_homes(facts, ["gpu", "host", "host", "nvme", "gpu"])
    plain = host_bytes(facts, policy)
    reached = plain["weights"] + plain["gradients"] + plain["activations"] + plain["staging"]
    assert 24 * MIB < reached < 48 * MIB
    for limit, slab in ((reached, 0), (reached - 1, 2 * MIB), (0, 0)):
        table = host_bytes(facts, policy, pinned_limit_bytes=limit)
        assert table == plain | {"staging": plain["staging"] + 6 * slab}


def test_host_table_in_float32_streams_the_master_itself(make_facts: Make) -> None:
    facts = ModelFacts(**(make_facts(2).model_dump() | {"dtype": "float32"}))
    assert state_bytes(facts)["master"] == 0
    assert sum(state_bytes(facts).values()) == pytest.approx(10.03125 * facts.parameters, rel=1e-6)


def test_staging_is_needed_for_nvme_and_for_accumulation(make_facts: Make) -> None:
    facts = make_facts(6)
    assert staging_bytes(facts, "host") == 0
    assert staging_bytes(facts, "nvme") == 2 * MIB
    assert staging_bytes(facts, "host", accumulation=2) > 0


@pytest.mark.parametrize("home", ["gpu", "host", "nvme"])
@pytest.mark.parametrize("tied,layers,accumulation", [(False, 6, 1), (True, 6, 1), (False, 6, 3), (True, 1, 2)])
def test_staging_is_what_a_program_holds_all_along(
    make_facts: Make, home: Home, tied: bool, layers: int, accumulation: int
) -> None:
    facts = make_facts(layers, tied=tied)
    homes: list[Home] = [home if i else "gpu" for i in range(layers)]
    program = lower(Policy.from_homes(facts, [*homes, "gpu"], accumulation=accumulation), facts)
    held = sum(buffer.bytes for buffer in program.buffers if buffer.tier == "host" and not buffer.acquired_by)
    assert staging_bytes(facts, home, accumulation) == held


@pytest.mark.parametrize(
    "options,each",
    [
        ({"master": "bf16_stochastic"}, {"master": 0, "optimizer_state": 2.03125}),
        ({"state_bits": 32}, {"master": 2, "optimizer_state": 8}),
        ({"block_size": 64}, {"master": 2, "optimizer_state": 2.125}),
        ({"eight_bit_fraction": 0.5}, {"master": 2, "optimizer_state": 5.015625}),
    ],
)
def test_the_optimizers_options_are_priced_and_so_is_what_is_parked(
    make_facts: Make, options: dict[str, Any], each: dict[str, float]
) -> None:
    facts = make_facts(4)
    policy = Policy.from_homes(facts, ["gpu"] * 5).model_copy(update={"optimizer": OptimizerOptions(**options)})
    table = host_bytes(facts, policy)
    assert {name: table[name] / facts.parameters for name in each} == pytest.approx(each, rel=1e-6)
    parked = policy.parked(optimizer=[1, 3])
    spared = sum(table.values()) - sum(host_bytes(facts, parked).values())
    rings = host_bytes(facts, parked)["staging"]
    assert spared + rings == pytest.approx(2 * MIB * sum(each.values()), rel=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_float32_states_of_embedding_and_head_are_counted(make_facts: Make, tied: bool) -> None:
    """Tied weights once, where they are owned; those of a layer also where they are on NVMe."""
    facts = make_facts(4, tied=tied)
    plain, wide = (
        Policy.from_homes(facts, ["gpu"] * 5).model_copy(update={"optimizer": OptimizerOptions(fp32_states=patterns)})
        for patterns in ((), ("model.embed.*", "lm_head.weight"))
    )
    more = sum(host_bytes(facts, wide).values()) - sum(host_bytes(facts, plain).values())
    assert more == pytest.approx((8 - 2.03125) * 2 * MIB * (1 if tied else 2), rel=1e-6)
    options = OptimizerOptions(fp32_states=("model.layers.3.weight",))
    layer = plain.model_copy(update={"optimizer": options})
    assert state_bytes(facts, layer.parked(optimizer=[3])) == state_bytes(facts, plain.parked(optimizer=[3]))
    assert parked_state_bytes(facts.layers[3], facts, options) == 10 * MIB


def test_gradients_of_more_than_one_contribution_are_summed_in_float32(make_facts: Make) -> None:
    plain, tied = make_facts(4), make_facts(4, tied=True)
    homes: list[Any] = ["gpu"] * 5
    assert state_bytes(plain, Policy.from_homes(plain, homes))["gradients"] == 2 * plain.parameters
    assert state_bytes(plain, Policy.from_homes(plain, homes, accumulation=2))["gradients"] == 4 * plain.parameters
    assert state_bytes(tied)["gradients"] == 2 * tied.parameters + 2 * tied.before[0].parameters
    assert state_bytes(tied, accumulation=3)["gradients"] == 4 * tied.parameters
