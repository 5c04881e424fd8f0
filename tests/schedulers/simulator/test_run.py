"""The simulator against programs worked out by hand, and against an independent event-driven evaluation."""

from __future__ import annotations

import heapq
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import Buffer, Op, Policy, Program, lower
from lazytrain.jobs.policy.artifact import Home
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.simulator import predict, run, simulate
from lazytrain.schedulers.simulator.memory import memory_over_time

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]


def op(name: str, stream: str, *after: str, workspace: int = 0) -> Op:
    kind = {"compute": "forward", "h2d": "load", "d2h": "gradient", "cpu": "norm", "nvme_read": "read"}[stream]
    return Op(name, kind, stream, 0, after=after, workspace_bytes=workspace)  # type: ignore[arg-type]


def test_double_buffered_loads_by_hand() -> None:
    # h2d      a a b b . c c          load c waits until compute a has left its slot
    # compute  . . A B B . . C
    program = Program(
        ops=(
            op("a", "h2d"),
            op("b", "h2d"),
            op("A", "compute", "a"),
            op("c", "h2d", "A"),
            op("B", "compute", "b"),
            op("C", "compute", "c"),
        ),
        buffers=(),
    )
    timeline = run(program, [2, 2, 1, 2, 2, 1])
    assert {s.op: (s.start_s, s.end_s) for s in timeline.spans} == {
        "a": (0, 2), "b": (2, 4), "A": (2, 3), "c": (4, 6), "B": (4, 6), "C": (6, 7)
    }  # fmt: skip
    assert timeline.step_s == 7
    assert timeline.exposed_s == {"h2d": 3, "d2h": 0, "nvme_read": 0, "nvme_write": 0, "cpu": 0}


def test_waiting_is_charged_to_whoever_was_at_work() -> None:
    # cpu        u u . . . . . n n    compute waits 2 for the update, 1 for the load after it, 1 for the read and the
    # nvme_read  . . . r r . .        reload behind it, and at the end 1 for the gradient and 2 for its norm
    # h2d        . . l . . R .
    # compute    . . . A . . B
    # d2h        . . . . . . . g
    program = Program(
        ops=(
            op("u", "cpu"),
            op("l", "h2d", "u"),
            op("A", "compute", "l"),
            op("r", "nvme_read", "l"),
            op("R", "h2d", "r"),
            op("B", "compute", "R"),
            op("g", "d2h", "B"),
            op("n", "cpu", "g"),
        ),
        buffers=(),
    )
    timeline = run(program, [2, 1, 1, 2, 1, 1, 1, 2])
    assert timeline.step_s == 10
    assert timeline.exposed_s == {"h2d": 2, "d2h": 1, "nvme_read": 1, "nvme_write": 0, "cpu": 4}


def test_memory_counts_copies_in_flight_and_workspace() -> None:
    # compute  A A B B C D       a: from A until D, which waits for its copy out, b: B until C ends, 7: workspace of B
    # h2d      . . . . . . d     d: from the end of C, when its copy in is handed over
    # d2h      . . a
    program = Program(
        ops=(
            op("A", "compute"),
            op("a", "d2h", "A"),
            op("B", "compute", workspace=7),
            op("C", "compute"),
            op("d", "h2d", "C"),
            op("D", "compute", "a", "d"),
        ),
        buffers=(
            Buffer("static", "gpu", 1),
            Buffer("a", "gpu", 10, "A", ("a",)),
            Buffer("b", "gpu", 100, "B", ("C",)),
            Buffer("d", "gpu", 1000, "d", ("D",)),
            Buffer("copy", "host", 10, "a"),
        ),
    )
    course = {0: 11, 2: 118, 4: 111, 5: 1011, 6: 1001, 7: 1}
    for copied in (0, 1):  # GPU memory is free once compute has waited for the copy, however early that ends
        timeline = run(program, [2, copied, 2, 1, 1, 1])
        assert timeline.peak_bytes == {"gpu": 1011, "host": 10, "nvme": 0}
        starts, ends = zip(*((span.start_s, span.end_s) for span in timeline.spans), strict=True)
        assert dict(memory_over_time(program, starts, ends, "gpu")) == course
    assert program.peak_bytes("gpu") == 1011


def test_a_duration_is_needed_for_each_operation() -> None:
    program = Program(ops=(op("A", "compute"),), buffers=())
    for bad in ([], [1.0, 2.0], [-1.0]):
        with pytest.raises(ValueError):
            run(program, bad)
    assert run(Program((), ()), []).step_s == 0.0


def events(program: Program, seconds: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Start and end of each operation by simulating clock ticks: queues per stream, a heap of running operations."""
    queues: dict[str, list[int]] = defaultdict(list)
    for position, one in enumerate(program.ops):
        queues[one.stream].append(position)
    done: set[str] = set()
    times: dict[str, tuple[float, float]] = {}
    busy: set[str] = set()
    running: list[tuple[float, int]] = []
    now = 0.0
    while len(done) < len(program.ops):
        for stream, queue in queues.items():
            if stream not in busy and queue and set(program.ops[queue[0]].after) <= done:
                position = queue.pop(0)
                busy.add(stream)
                heapq.heappush(running, (now + seconds[position], position))
                times[program.ops[position].id] = (now, now + seconds[position])
        now, position = heapq.heappop(running)
        done.add(program.ops[position].id)
        busy.remove(program.ops[position].stream)
    return times


@st.composite
def policies(draw: st.DrawFn) -> tuple[list[Home], int, int]:
    layers = draw(st.integers(1, 12))
    inner: list[Home] = draw(
        st.lists(st.sampled_from(["gpu", "host", "nvme", "recompute"]), min_size=layers - 1, max_size=layers - 1)
    )
    first: Home = draw(st.sampled_from(["gpu", "host", "nvme"]))
    return [first, *inner, "gpu"], draw(st.integers(1, 2)), draw(st.integers(2, 3))


@given(policies(), st.integers(0, 10**9), st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_random_programs_agree_with_events_and_stay_below_the_structural_bound(
    make_facts: Make, case: tuple[list[Home], int, int], seed: int, tied: bool
) -> None:
    homes, accumulation, slots = case
    facts = make_facts(len(homes) - 1, workspace=6 * MIB, tied=tied)
    program = lower(Policy.from_homes(facts, homes, accumulation=accumulation, weight_slots=slots), facts)
    generator = random.Random(seed)
    scale = {one.stream: generator.choice([0.0, 0.1, 1.0, 10.0]) for one in program.ops}
    seconds = [scale[one.stream] * generator.random() for one in program.ops]
    timeline = run(program, seconds)
    expected = events(program, seconds)
    assert {s.op: (s.start_s, s.end_s) for s in timeline.spans} == expected
    assert timeline.step_s == max(end for _, end in expected.values())
    idle = timeline.step_s - timeline.busy_s()["compute"]
    assert sum(timeline.exposed_s.values()) == pytest.approx(idle)
    assert min(timeline.exposed_s.values()) >= 0
    for tier in ("gpu", "host", "nvme"):
        assert timeline.peak_bytes[tier] <= program.peak_bytes(tier)
    assert timeline.peak_bytes["gpu"] == program.peak_bytes("gpu")


def test_a_step_that_is_all_compute_takes_its_compute(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(6)
    fast = {"h2d_bytes_s": 1e18, "d2h_bytes_s": 1e18, "host_bytes_s": 1e18, "update_parameters_s": 1e18}
    predicted = predict(Policy.from_homes(facts, ["gpu"] * 7), facts, make_profile(**fast))
    assert predicted.step_s == pytest.approx((6 * 4 + 3) * 1e-3)
    assert predicted.compute_units == 4.0
    assert predicted.tokens_per_s == pytest.approx(32 / 27e-3)
    assert predicted.tflops_6n == pytest.approx(6 * facts.parameters * 32 / 27e-3 / 1e12)
    assert predicted.host_bytes_per_parameter == pytest.approx(8.03125, rel=1e-6)
    assert sum(predicted.exposed_s.values()) == pytest.approx(0.0, abs=1e-9)


def test_a_step_that_is_all_loading_takes_its_loads(make_facts: Make, make_profile: Machine) -> None:
    facts = make_facts(6)
    policy = Policy.from_homes(facts, ["gpu"] * 7)
    profile = make_profile(h2d_bytes_s=1e6, d2h_bytes_s=1e18)
    timeline = simulate(policy, facts, profile)
    loads = timeline.bytes_by_stream()["h2d"] / 1e6
    assert loads <= timeline.step_s <= loads * 1.01
    assert max(timeline.exposed_s, key=timeline.exposed_s.__getitem__) == "h2d"
    assert predict(policy, facts, profile).step_s == timeline.step_s


def test_accumulation_runs_as_many_micro_batches(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(4), make_profile()
    one, three = (
        predict(Policy.from_homes(facts, ["gpu"] * 5, accumulation=k), facts, profile) for k in (1, 3)
    )  # fmt: skip
    assert 2 * one.step_s < three.step_s < 3.2 * one.step_s
    assert three.compute_units == one.compute_units


def calls_to_simulate(layers: int, make_facts: Make, make_profile: Machine) -> int:
    """How many functions are called for a program of so many layers."""
    facts, profile = make_facts(layers), make_profile()
    homes: list[Home] = [*["host", "recompute", "gpu", "nvme"] * (layers // 4), "gpu"]  # type: ignore[list-item]
    policy, calls = Policy.from_homes(facts, homes), 0

    def count(_frame: Any, what: str, _arg: Any) -> None:
        nonlocal calls
        calls += what in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        simulate(policy, facts, profile)
    finally:
        sys.setprofile(before)
    return calls


def test_work_grows_with_the_layers_and_no_faster(make_facts: Make, make_profile: Machine) -> None:
    few, many = (calls_to_simulate(layers, make_facts, make_profile) for layers in (40, 160))
    assert few < many < 4.4 * few
