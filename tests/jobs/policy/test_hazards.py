"""The waits of a program are exactly those that its data and its memory need: not one fewer, not one more."""

from __future__ import annotations

import random
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from lazytrain.jobs.errors import InvariantBroken
from lazytrain.jobs.policy import lower, lower_forward
from lazytrain.jobs.policy.hazards import check
from lazytrain.jobs.policy.lowering import lower_rest
from lazytrain.jobs.policy.order import NORMS, Phase

draw_policy = runpy.run_path(str(Path(__file__).with_name("test_lowering.py")))["draw_policy"]


def draw_program(make_facts, seed):
    choose = random.Random(seed)
    before = choose.randint(0, 2)
    tied = before > 0 and choose.random() < 0.5
    facts = make_facts(choose.randint(1, 8), before=before, after=choose.randint(0, 2), tied=tied)
    policy = draw_policy(facts, seed, accumulation=choose.randint(1, 3))
    if seed % 2:
        state, gradients = ([i for i in range(len(facts.layers)) if choose.random() < 0.5] for _ in range(2))
        policy = policy.parked(optimizer=state, gradients=gradients)
    return facts, lower(policy, facts)


def without_op(program, name):
    """The program without one operation, and without the waits for it."""
    kept = [op for op in program.ops if op.id != name]
    ops = tuple(replace(op, after=tuple(a for a in op.after if a != name)) for op in kept)
    held = [
        (buffer, moments)
        for buffer, moments in zip(program.buffers, program.promised, strict=True)
        if name not in (buffer.acquired_by, *buffer.released_by)
    ]
    return replace(program, ops=ops, buffers=tuple(b for b, _ in held), promised=tuple((0, 10**6) for _ in held))


def without_wait(program, position, name):
    op = program.ops[position]
    fewer = replace(op, after=tuple(other for other in op.after if other != name))
    return replace(program, ops=(*program.ops[:position], fewer, *program.ops[position + 1 :]))


def test_the_waits_of_every_program_suffice(make_facts):
    for seed in range(100, 200):
        facts, program = draw_program(make_facts, seed)
        assert len(check(program, facts)) > len(program.ops)
    check(lower_forward(make_facts(5, before=2)), make_facts(5, before=2))


def test_removing_any_one_wait_breaks_a_named_invariant(make_facts):
    broken = set()
    for seed in range(8):
        facts, program = draw_program(make_facts, seed)
        for position, op in enumerate(program.ops):
            for name in op.after:
                with pytest.raises(InvariantBroken) as caught:
                    check(without_wait(program, position, name), facts)
                broken.add(caught.value.invariant)
    assert broken == {"made before read", "free before reuse", "bytes as promised"}


@pytest.mark.parametrize(
    "kind, invariant",
    [
        ("load", "loaded once"),
        ("forward", "loaded once"),
        ("update", "one update"),
        ("norm", "one update"),
        ("swap_in", "made before read"),
        ("reload", "made before read"),
    ],
)
def test_leaving_out_an_operation_breaks_an_invariant(kind, invariant, make_facts):
    for seed in range(0, 40, 2):
        facts, program = draw_program(make_facts, seed)
        for op in program.ops:
            if op.kind == kind and (kind != "load" or op.slot >= 0):
                with pytest.raises(InvariantBroken) as caught:
                    check(without_op(program, op.id), facts)
                assert caught.value.invariant in (invariant, "made before read"), op


def test_a_load_that_nobody_needs_is_found(make_facts):
    facts, program = draw_program(make_facts, 3)
    again = next(op for op in program.ops if op.kind == "load" and op.slot >= 0)
    position = program.index[again.id] + 1
    twice = (*program.ops[:position], replace(again, id="again"), *program.ops[position:])
    with pytest.raises(InvariantBroken, match="loaded once"):
        check(replace(program, ops=twice), facts)


def test_no_wait_follows_from_others(make_facts):
    for seed in range(50):
        _, program = draw_program(make_facts, seed)
        for position, op in enumerate(program.ops):
            for name in op.after:
                without = without_wait(program, position, name)
                assert not (without.ancestors[position] >> program.index[name]) & 1, (op.id, name)


def phases(text):
    """``F0 E1 B0`` as phases, with the norms at the end."""
    kinds = {"F": "forward", "B": "backward", "E": "evaluate"}
    return (*(Phase(kinds[word[0]], int(word[1:])) for word in text.split()), NORMS)


@pytest.mark.parametrize("order", ["F0 F1 B1 B0", "F0 E1 B0", "F0 F1 B0 F2 B1 B2 E3"])
def test_other_orders_need_every_wait_too(order, make_facts):
    for seed in range(0, 8, 2):
        choose = random.Random(seed)
        facts = make_facts(choose.randint(1, 5), before=choose.randint(1, 2), tied=choose.random() < 0.5)
        program = lower(draw_policy(facts, seed), facts, order=phases(order))
        check(program, facts)
        for position, op in enumerate(program.ops):
            for name in op.after:
                with pytest.raises(InvariantBroken):
                    check(without_wait(program, position, name), facts)


@pytest.mark.parametrize("gradients", [False, True])
def test_the_rest_of_a_step_is_right_too(gradients, make_facts):
    for seed in range(0, 20, 2):
        facts = make_facts(4)
        rest = lower_rest(draw_policy(facts, seed).parked(), facts, phases("E2 B1 F3 B3"), gradients=gradients)
        check(rest, facts)
        kinds = {op.kind for op in rest.ops}
        assert "update" not in kinds and {"norm", "clip"} <= kinds
        first = next(op for op in rest.ops if op.kind == "gradient")
        added = first.id.replace("gradient", "accumulate") in rest.index
        assert added == gradients
