"""Optimizer state and gradients on NVMe in the program: what is read and written, when, through which buffers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lazytrain.jobs.errors import ProgramError
from lazytrain.jobs.policy import Policy, lower
from lazytrain.jobs.policy.parked import RING, parked_state_bytes


def policy_of(facts, *, optimizer=(), gradients=(), **options):
    homes = ["gpu"] * (len(facts.layers) + 1)
    return Policy.from_homes(facts, homes, **options).parked(optimizer=optimizer, gradients=gradients)


def cases(make_facts):
    for seed in range(60):
        choose = random.Random(seed)
        facts = make_facts(choose.randint(1, 9), tied=choose.random() < 0.3)
        layers = range(len(facts.layers))
        state, gradients = ({i for i in layers if choose.random() < 0.6} for _ in range(2))
        policy = policy_of(facts, optimizer=state, gradients=gradients, accumulation=choose.randint(1, 3))
        yield facts, policy, state, gradients, lower(policy, facts)


def test_the_example_of_the_module(make_facts):
    facts = make_facts(5)
    ops = lower(policy_of(facts, optimizer=range(5), gradients=[0, 1]), facts).ops
    reads = ["read_state.0", "read_gradient.0", "read_state.1", "read_gradient.1", "read_state.2"]
    assert [op.id for op in ops[:5]] == reads
    assert [op.id for op in ops if op.kind in ("update", "write_state")][:4] == [
        "update.embed0", "update.0", "write_state.0", "update.1",
    ]  # fmt: skip
    by_id = {op.id: op for op in ops}
    assert by_id["update.1"].after == ("read_gradient.1",)  # which comes after its state on the same stream
    assert by_id["read_state.3"].after == ("write_state.0",)  # the ring has three buffers
    assert by_id["load.0@0"].after == ("update.0",)  # not its state's way back to the disk
    assert by_id["write_gradient.1@0"].after == ("norm.1",)


def test_everything_parked_is_read_and_written_as_often_as_it_must_be(make_facts):
    for facts, policy, state, gradients, program in cases(make_facts):
        kinds = Counter((op.kind, op.unit - len(facts.before)) for op in program.ops)
        for layer in range(len(facts.layers)):
            assert kinds["read_state", layer] == kinds["write_state", layer] == (layer in state)
            times = policy.accumulation if layer in gradients else 0
            assert kinds["write_gradient", layer] == times
            assert kinds["read_gradient", layer] == times  # once for the update, once before each further contribution


def test_bytes_on_the_link_are_those_of_what_is_parked(make_facts):
    for facts, policy, state, gradients, program in cases(make_facts):
        moved = program.bytes_by_stream()
        layers, n = facts.layers, policy.accumulation
        of_states = sum(parked_state_bytes(layers[i], facts, policy.optimizer) for i in state)
        of_gradients = n * sum(layers[i].weight_bytes for i in gradients)  # float32 already
        assert moved.get("nvme_read", 0) == moved.get("nvme_write", 0) == of_states + of_gradients


def test_sums_of_bfloat16_gradients_are_kept_in_float32(make_facts):
    facts = make_facts(3).model_copy(update={"dtype": "bfloat16"})
    once, summed = (lower(policy_of(facts, gradients=[1], accumulation=n), facts) for n in (1, 2))
    sizes = [{op.bytes for op in program.ops if op.kind == "write_gradient"} for program in (once, summed)]
    assert sizes == [{facts.layers[1].weight_bytes}, {2 * facts.layers[1].weight_bytes}]


@pytest.mark.parametrize("ring", ["state", "gradient"])
def test_a_buffer_of_a_ring_is_used_again_only_when_its_last_use_has_ended(make_facts, ring):
    """Follows every buffer through the step: it must be impossible that two units hold it at the same time."""
    ending = {"state": ("write_state",), "gradient": ("update", "write_gradient")}[ring]
    for facts, _, state, gradients, program in cases(make_facts):
        first, parked = len(facts.before), state if ring == "state" else gradients
        uses, running = [], {}
        for position, op in enumerate(program.ops):
            if op.unit - first not in parked:
                continue
            adds = f"accumulate.{op.id.split('.', 1)[1]}" in program.index
            takes = op.kind == f"read_{ring}" or (ring == "gradient" and op.kind == "gradient" and not adds)
            if takes:
                running[op.unit] = [position, None]
                uses.append(running[op.unit])
            elif op.kind in ending:
                running[op.unit][1] = position
        assert all(end is not None for _, end in uses)
        for (start, _), (_, ended) in zip(uses[RING:], uses, strict=False):
            assert (program.ancestors[start] >> ended) & 1, (program.ops[start], program.ops[ended])


def test_rings_are_on_the_host_and_homes_on_nvme_all_the_step_long(make_facts):
    facts = make_facts(6)
    plain = lower(policy_of(facts), facts)
    program = lower(policy_of(facts, optimizer=[2, 3, 4, 5], gradients=[5]), facts)
    state = parked_state_bytes(facts.layers[2], facts, policy_of(facts).optimizer)
    gradient = facts.layers[5].weight_bytes
    assert program.peak_bytes("host") - plain.peak_bytes("host") == RING * state + gradient
    assert program.peak_bytes("nvme") == 5 * 4096  # whole blocks
    assert program.peak_bytes("gpu") == plain.peak_bytes("gpu")


def test_true_bytes_of_a_state_replace_the_reckoned_ones(make_facts):
    facts = make_facts(3)
    program = lower(policy_of(facts, optimizer=[1]), facts, state_bytes={2: 12345, 3: 1})
    assert {op.bytes for op in program.ops if op.kind in ("read_state", "write_state")} == {12345}


def test_the_policys_homes_and_its_layers_must_agree(make_facts):
    facts = make_facts(3)
    policy = policy_of(facts, optimizer=[1])
    assert (policy.optimizer_home, policy.gradient_home) == ("nvme", "host")
    assert Policy.model_validate_json(policy.to_json()) == policy
    for changes in ({"optimizer_home": "host"}, {"gradient_home": "nvme"}):
        with pytest.raises(ProgramError, match=next(iter(changes))):
            policy.model_copy(update=changes).check(facts)
    assert policy.parked() == policy_of(facts)
