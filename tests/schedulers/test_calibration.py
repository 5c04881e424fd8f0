"""What is fitted to measured steps: exact where the machine is as the model says, and right in sum where it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import LayerPolicy, Policy
from lazytrain.jobs.timeline import Timeline
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.replan import Measured
from lazytrain.schedulers.simulator import simulate

Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]
ON_GPU = ["gpu"] * 7
OTHER = ["gpu", "recompute", "host", "gpu", "host", "gpu", "gpu"]
LINKS = {"h2d_bytes_s": 1e12, "d2h_bytes_s": 1e12}


def probe_of(facts: ModelFacts, *kinds: str) -> Policy:
    """Every boundary on the GPU, and layers that keep what ``kinds`` say, in turn."""
    layers = tuple(LayerPolicy(index=i, internals=kinds[i % len(kinds)]) for i in range(len(facts.layers)))  # type: ignore[arg-type]
    return Policy.from_homes(facts, ["gpu"] * (len(facts.layers) + 1)).model_copy(update={"layers": layers})


def idle_before(timeline: Timeline, seconds: float, prefixes: tuple[str, ...]) -> Timeline:
    """The timeline of a host that needs so long before it gives each operation of these kinds, and all that follows."""
    late, spans = 0.0, []
    for span in timeline.spans:
        late += seconds if span.op.startswith(prefixes) else 0.0
        spans.append(replace(span, start_s=span.start_s + late, end_s=span.end_s + late))
    return replace(timeline, spans=spans, step_s=timeline.step_s + late)


@pytest.mark.parametrize("kinds", [("none", "matmuls", "all"), ("none",), ("all",), ("matmuls",), ("matmuls", "all")])
def test_what_keeping_takes_is_found_in_any_steps(
    kinds: tuple[str, ...], make_facts: Make, make_profile: Machine
) -> None:
    facts, believed = make_facts(6, flops=5e9), make_profile(**LINKS)
    changes = {"backward_forwards": 1.6, "reforward_matmuls": 0.4, "reforward_all": 0.2}
    known = {"matmuls": ("matmuls",), "all": ("all",)}
    if "none" not in kinds:  # the gradients' share is not seen apart from what the first of them takes beside them
        first = next(kind for kind in ("all", "matmuls") if kind in kinds)
        believed = believed.model_copy(update={f"reforward_{first}": changes[f"reforward_{first}"]})
    truth = believed.model_copy(update={"matmul_flops": {"bfloat16": 0.4e12}, **changes})
    probe = probe_of(facts, *kinds)
    measured = Measured.of([simulate(probe, facts, truth)], probe, facts, believed)
    found = measured.calibrated(believed)
    assert found.backward_forwards == pytest.approx(1.6)
    for kind in known:
        if kind in kinds:
            assert found.reforward(kind) == pytest.approx(changes[f"reforward_{kind}"])  # type: ignore[arg-type]
    assert found.operation_overhead_s == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("late", [("forward", "backward", "loss"), ("load",)])
def test_time_in_which_only_the_host_was_late_is_overhead(
    late: tuple[str, ...], make_facts: Make, make_profile: Machine
) -> None:
    facts, believed = make_facts(6, flops=5e9), make_profile(**LINKS, operation_overhead_s=0.5)
    probe = probe_of(facts, "none", "matmuls", "all")
    bare = simulate(probe, facts, believed.model_copy(update={"operation_overhead_s": 0.0}))
    steps = [idle_before(bare, seconds, late) for seconds in (1e-3, 3e-3)]
    found = Measured.of(steps, probe, facts, believed).calibrated(believed)
    assert found.matmul_flops == pytest.approx(believed.matmul_flops)
    assert simulate(probe, facts, found).step_s == pytest.approx((steps[0].step_s + steps[1].step_s) / 2, rel=2e-3)


def test_a_layer_that_was_held_up_counts_as_overhead_alone(make_facts: Make, make_profile: Machine) -> None:
    facts, believed = make_facts(6, flops=5e9), make_profile(**LINKS)
    probe = probe_of(facts, "none")
    step = simulate(probe, facts, believed)
    held, spans = 0.02, []
    for span in step.spans:
        after = span.start_s >= next(s.end_s for s in step.spans if s.op == "forward.0@0")
        end_s = span.end_s + held * (after or span.op == "forward.0@0")
        spans.append(replace(span, start_s=span.start_s + held * after, end_s=end_s))
    found = Measured.of([replace(step, spans=spans)], probe, facts, believed).calibrated(believed)
    assert found.matmul_flops == pytest.approx(believed.matmul_flops)
    assert found.backward_forwards == pytest.approx(believed.backward_forwards)
    computes = sum(span.stream == "compute" for span in spans)
    assert found.operation_overhead_s == pytest.approx(held / computes)


def test_frozen_weights_make_a_backward_shorter_not_the_machine_faster(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(6, flops=5e9), make_profile(**LINKS)
    layers = tuple(layer.model_copy(update={"trainable_parameters": layer.parameters // 4}) for layer in facts.layers)
    facts = facts.model_copy(update={"layers": layers})
    probe = probe_of(facts, "none", "matmuls", "all")
    found = Measured.of([simulate(probe, facts, profile)], probe, facts, profile).calibrated(profile)
    assert found.backward_forwards == pytest.approx(profile.backward_forwards)


def test_steps_without_a_layer_calibrate_rates_alone(make_facts: Make, make_profile: Machine) -> None:
    facts, profile = make_facts(6), make_profile()
    probe = probe_of(facts, "none")
    step = simulate(probe, facts, profile)
    loads = replace(step, spans=[span for span in step.spans if span.stream == "h2d"])
    measured = Measured.of([loads], probe, facts, profile.model_copy(update={"h2d_bytes_s": 2e9}))
    assert measured.compute is None
    found = measured.calibrated(profile)
    assert found.h2d_bytes_s == pytest.approx(profile.h2d_bytes_s / 2)
    assert found.model_copy(update={"h2d_bytes_s": profile.h2d_bytes_s}) == profile
