"""What a step program must hold whatever the policy: order, bytes, memory."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain.jobs.errors import ProgramError
from lazytrain.jobs.policy import LayerPolicy, Policy, lower, lower_forward


def draw_policy(facts, seed, **options):
    choose = random.Random(seed)
    homes = [choose.choice(("gpu", "host", "nvme", "recompute")) for _ in facts.layers]
    homes[0] = choose.choice(("gpu", "host", "nvme"))
    policy = Policy.from_homes(facts, [*homes, "gpu"], weight_slots=choose.choice((2, 3, 4)), **options)
    layers = [
        LayerPolicy(
            index=i,
            internals="none" if [*homes, "gpu"][i + 1] == "recompute" else choose.choice(("none", "matmuls", "all")),
            internals_home=choose.choice(("gpu", "host")),
            resident=choose.random() < 0.3,
        )
        for i in range(len(homes))
    ]
    policy = policy.model_copy(update={"staging_slots": choose.choice((1, 2, 3)), "layers": tuple(layers)})
    parked = [{layer for layer in range(len(layers)) if choose.random() < share} for share in (0.4, 0.4)]
    policy = policy.parked(optimizer=parked[0], gradients=parked[1]) if choose.random() < 0.5 else policy
    return policy.model_copy(update={"direct_nvme": choose.random() < 0.5})


@pytest.fixture(scope="module")
def programs(make_facts):
    """A few hundred random programs, with the facts and policies they come from."""
    cases = []
    for seed in range(200):
        choose = random.Random(seed)
        before = choose.randint(0, 2)
        tied = before > 0 and choose.random() < 0.5
        facts = make_facts(choose.randint(1, 8), before=before, after=choose.randint(0, 2), tied=tied)
        policy = draw_policy(facts, seed, accumulation=choose.randint(1, 3))
        cases.append((facts, policy, lower(policy, facts)))
    return cases


def test_an_operation_comes_after_all_that_it_waits_for(programs):
    for _, _, program in programs:
        for position, op in enumerate(program.ops):
            assert all(program.index[name] < position for name in op.after), op


def test_every_id_is_given_once_and_every_buffer_names_real_operations(programs):
    for _, _, program in programs:
        assert max(Counter(op.id for op in program.ops).values()) == 1
        for buffer in program.buffers:
            assert all(name in program.index for name in (buffer.acquired_by or "clip", *buffer.released_by)), buffer


def test_each_unit_runs_forward_and_backward_once_per_micro_batch(programs):
    for facts, policy, program in programs:
        runs = Counter((op.kind, op.unit, op.micro) for op in program.ops if op.kind in ("forward", "loss", "backward"))
        assert set(runs.values()) == {1}
        assert len(runs) == 2 * len(facts.units) * policy.accumulation


def test_each_parameter_gets_one_update_one_norm_and_all_its_gradients(programs):
    for facts, policy, program in programs:
        owners = [u for u, unit in enumerate(facts.units) if not unit.shares_weights_with]
        kinds = Counter((op.kind, op.unit) for op in program.ops)
        assert all(kinds["update", u] == kinds["norm", u] == 1 for u in owners)
        assert kinds["clip", -1] == 1
        for u in range(len(facts.units)):
            assert kinds["gradient", u] == policy.accumulation
        landed = sum(kinds[kind, u] for kind in ("gradient",) for u in range(len(facts.units)))
        added = sum(kinds["accumulate", u] for u in range(len(facts.units)))
        assert landed - added == len(owners)  # the first gradient of a master is stored, all others are added to it


def test_boundaries_leave_and_come_back_exactly_where_the_policy_says(programs):
    for facts, policy, program in programs:
        first = len(facts.before)
        for layer, home in enumerate(policy.homes[:-1]):
            kinds = Counter(op.kind for op in program.ops if op.unit == first + layer)
            ways = ("offload", "reload", "write", "read", "spill", "fetch")
            moved = {kind: kinds[kind] // policy.accumulation for kind in ways if kinds[kind]}
            by_home = {"host": ways[:2], "nvme": ways[4:] if policy.direct_nvme else ways[:4]}
            assert moved == dict.fromkeys(by_home.get(home, ()), 1), (layer, home)


def test_a_boundary_that_goes_to_nvme_directly_takes_nothing_of_the_host(make_facts):
    facts = make_facts(6)
    policy = Policy.from_homes(facts, ["nvme"] * 6 + ["gpu"])
    by_way_of_host, direct = (lower(policy.model_copy(update={"direct_nvme": way}), facts) for way in (False, True))
    assert by_way_of_host.peak_bytes("host") > direct.peak_bytes("host") == 0
    assert by_way_of_host.peak_bytes("nvme") == direct.peak_bytes("nvme")
    moved, before = direct.bytes_by_stream(), by_way_of_host.bytes_by_stream()
    boundaries = sum(facts.boundary_bytes[:6])
    assert (moved["nvme_write"], moved["nvme_read"]) == (before["nvme_write"], before["nvme_read"])
    assert before["d2h"] - moved["d2h"] == before["h2d"] - moved["h2d"] == boundaries


def test_a_recomputed_boundary_is_made_by_the_layer_below_it(programs):
    for facts, policy, program in programs:
        first = len(facts.before)
        recomputed = {op.unit - first + 1 for op in program.ops if op.kind == "recompute"}
        wanted = {layer for layer, home in enumerate(policy.homes) if home == "recompute"}
        blocks = set(wanted)
        for layer in sorted(wanted):  # a block is recomputed from its first boundary on
            while policy.homes[layer - 1] == "recompute":
                layer -= 1
            blocks.add(layer)
        assert recomputed == wanted == blocks


def test_a_layer_computes_only_while_its_slot_holds_its_weights(programs):
    for facts, _, program in programs:
        held = {}
        for op in program.ops:
            if op.kind == "load" and op.slot >= 0:
                held[op.slot] = op.unit
            elif op.stream == "compute" and facts.units[op.unit].kind == "layer":
                assert held[op.slot] == op.unit, op


def test_a_slot_is_filled_only_after_its_last_user_has_ended(programs):
    for _, _, program in programs:
        last_user = {}
        for position, op in enumerate(program.ops):
            if op.kind == "load" and op.slot >= 0 and op.slot in last_user:
                assert (program.ancestors[position] >> last_user[op.slot]) & 1, op
            if op.stream == "compute" and op.slot >= 0:
                last_user[op.slot] = position


def test_updates_precede_the_first_load_of_what_they_change(programs):
    for facts, _, program in programs:
        for position, op in enumerate(program.ops):
            if op.kind == "load":
                name = facts.units[op.unit].shares_weights_with or facts.units[op.unit].name
                owner = next(u for u, unit in enumerate(facts.units) if unit.name == name)
                update = next(i for i, o in enumerate(program.ops) if o.kind == "update" and o.unit == owner)
                assert (program.ancestors[position] >> update) & 1


def simulated_peak(program, durations, tier):
    """Exact use over time for given durations: an independent count of what `peak_bytes` bounds."""
    start, end, stream_free = {}, {}, {}
    for op in program.ops:
        start[op.id] = max([stream_free.get(op.stream, 0.0), *(end[name] for name in op.after)])
        end[op.id] = stream_free[op.stream] = start[op.id] + durations[op.id]
    events = []
    for b in program.buffers:
        if b.tier == tier:
            freed = max((end[name] for name in b.released_by), default=float("inf"))
            events += [(start[b.acquired_by] if b.acquired_by else 0.0, 1, b.bytes), (freed, 0, -b.bytes)]
    for op in program.ops:
        if tier == "gpu" and op.workspace_bytes:
            events += [(start[op.id], 1, op.workspace_bytes), (end[op.id], 0, -op.workspace_bytes)]
    used = peak = 0
    for _, _, change in sorted(events):
        used += change
        peak = max(peak, used)
    return peak


@pytest.mark.parametrize("tier", ["gpu", "host", "nvme"])
def test_the_peak_bounds_every_timing(programs, tier):
    choose = random.Random(tier)
    for _, _, program in programs:
        bound = program.peak_bytes(tier)
        for _ in range(5):
            scale = {
                s: 10 ** choose.uniform(-2, 2) for s in ("compute", "h2d", "d2h", "nvme_read", "nvme_write", "cpu")
            }
            durations = {op.id: scale[op.stream] * choose.uniform(0.5, 2) for op in program.ops}
            assert simulated_peak(program, durations, tier) <= bound


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_equal_questions_get_equal_programs(make_facts, seed):
    facts = make_facts(4)
    policy = draw_policy(facts, seed)
    assert lower(policy, facts) == lower(policy, facts)


def test_a_forward_program_only_loads_and_computes(make_facts):
    program = lower_forward(make_facts(5, before=2))
    assert {op.kind for op in program.ops} == {"load", "forward"}
    assert [op.unit for op in program.ops if op.kind == "forward"] == list(range(9))


@pytest.mark.parametrize(
    "homes, why",
    [
        (["recompute", "gpu", "gpu"], "boundary 0"),
        (["gpu", "gpu", "host"], "last boundary"),
        (["gpu", "gpu"], "boundaries 0..2"),
    ],
)
def test_an_impossible_policy_is_refused(make_facts, homes, why):
    facts = make_facts(2)
    with pytest.raises(ProgramError, match=why):
        lower(Policy.from_homes(facts, homes), facts)


def test_internals_of_a_layer_that_is_run_again_are_refused(make_facts):
    facts = make_facts(3)
    policy = Policy.from_homes(facts, ["gpu", "gpu", "recompute", "gpu"])
    layers = [layer.model_copy(update={"internals": "all"}) if layer.index == 1 else layer for layer in policy.layers]
    with pytest.raises(ProgramError, match=r"layers \[1\] keep internals"):
        lower(policy.model_copy(update={"layers": tuple(layers)}), facts)


@pytest.mark.parametrize("slots, loads", [(2, 6), (3, 5), (4, 4)])
def test_a_block_that_fits_the_slots_loads_each_weight_once_for_its_backward(slots, loads, make_facts):
    facts = make_facts(8)
    homes = ["host", "recompute", "recompute", "recompute", "host", "recompute", "recompute", "recompute", "gpu"]
    program = lower(Policy.from_homes(facts, homes, weight_slots=slots), facts)
    backward = program.ops[program.index["loss.lm_head@0"] :]
    first_block = range(len(facts.before), len(facts.before) + 4)
    loaded = [op.id for op in backward if op.kind == "load" and op.unit in first_block]
    assert len(loaded) == loads, loaded
