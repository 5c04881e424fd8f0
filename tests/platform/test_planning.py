"""What the planner may use, what it answers for people, and what probes correct."""

from pathlib import Path

import pytest

from lazytrain.jobs.errors import DoesNotFit, HardwareError, InputError, ModelError
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.models import facts_of, find_model, model_of
from lazytrain.platform.planning import (
    Limits,
    Observation,
    calibrate,
    device_kind,
    emulated,
    feasible_policy,
    make_plan,
    plain_training_bytes,
    predicted_batch,
)
from lazytrain.schedulers.hardware import hardware
from lazytrain.schedulers.simulator import simulate

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
PROFILE = hardware("RTX3090")


@pytest.fixture(scope="module")
def facts():  # type: ignore[no-untyped-def]
    return facts_of(CONFIG, batch=4, length=16)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_the_solver_has_a_time_that_ends(seconds: float) -> None:
    with pytest.raises(InputError, match="the solver cannot have"):
        Limits().override(solve_seconds=seconds)


def test_limits_come_from_the_job_file(tiny_job: Path) -> None:
    limits = Limits.of(load_spec(tiny_job, ("plan.gpu_memory=1GB", "plan.nvme=null")))
    assert (limits.gpu_memory, limits.host_memory, limits.nvme) == (10**9, None, 0)
    changed = limits.override(host_memory="2GB", planner=None)
    assert (changed.gpu_memory, changed.host_memory, changed.planner) == (10**9, "2GB", limits.planner)


def test_a_job_with_adapters_is_planned_as_what_it_trains(tiny_job: Path) -> None:
    """Without weights; and what it needs is less than of all parameters, in each memory that training shares."""
    lora = load_spec(tiny_job, ("lora={rank: 2}", "model.dtype=float32"))
    source = model_of(lora)
    assert all(parameter.is_meta for parameter in source.parameters())  # type: ignore[union-attr]
    full, adapted = (
        facts_of(each, batch=4, length=16, dtype="float32") for each in (find_model(lora.model.path), source)
    )
    assert model_of(load_spec(tiny_job)).to_dict() == find_model(lora.model.path).to_dict()  # type: ignore[union-attr]
    plans = [make_plan(each, PROFILE, Limits(planner="every_layer")) for each in (full, adapted)]
    for name in ("peak_host_bytes", "peak_gpu_bytes", "step_s"):
        wide, narrow = (getattr(answer.predicted, name) for answer in plans)
        assert narrow < wide, name
    assert adapted.trainable_parameters < full.trainable_parameters / 5
    with pytest.raises(ModelError, match="no module 'q_prj'"):
        model_of(load_spec(tiny_job, ("lora={target_modules: [q_prj]}",)))


def test_reasons_become_an_error(facts) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DoesNotFit) as caught:
        feasible_policy(make_plan(facts, PROFILE, Limits(gpu_memory=1000)))
    assert caught.value.reasons[0]["resource"] == "gpu_memory"
    assert "gpu_memory needs" in caught.value.message


@pytest.mark.parametrize(("text", "kind"), [("cpu", "cpu"), ("cuda", "cuda"), ("emulated:H800", "emulated")])
def test_devices(text: str, kind: str) -> None:
    found, profile = device_kind(text)
    assert found == kind
    assert (profile is not None and profile.device == "emulated") == (kind == "emulated")


@pytest.mark.parametrize("text", ["tpu", "emulated", "emulated:", "emulated:RTX 9999 Ultra", "cpu:1"])
def test_a_device_nobody_knows(text: str) -> None:
    with pytest.raises(HardwareError):
        device_kind(text)


def test_an_emulated_device_has_the_profiles_memory_and_links() -> None:
    device = emulated(PROFILE.model_copy(update={"device": "emulated"}))
    assert device.memory_bytes == PROFILE.gpu_memory_bytes
    assert device.h2d_bytes_s == PROFILE.h2d_bytes_s
    assert device.nvme_write_bytes_s == PROFILE.nvme_write_bytes_s


def test_plain_training_holds_all_states_and_all_activations(facts) -> None:  # type: ignore[no-untyped-def]
    states = 16 * facts.parameters
    kept = sum(layer.saved_bytes for layer in facts.layers)
    assert states + kept <= plain_training_bytes(facts) < 2 * (states + kept)


def test_calibration_finds_the_efficiency_that_made_the_times(facts) -> None:  # type: ignore[no-untyped-def]
    true = PROFILE.model_copy(update={"efficiency": 0.013})
    policy = feasible_policy(make_plan(facts, PROFILE, Limits()))
    seen = [Observation(facts, policy, simulate(policy, facts, true).step_s)]
    assert calibrate(PROFILE, seen).efficiency == pytest.approx(0.013, rel=0.02)


def test_calibration_corrects_a_rate_that_was_measured_too_low(facts) -> None:  # type: ignore[no-untyped-def]
    policy = feasible_policy(make_plan(facts, PROFILE, Limits()))
    measured = PROFILE.model_copy(update={"matmul_flops": {"bfloat16": PROFILE.matmul_flops["bfloat16"] / 1000}})
    slow = measured.model_copy(update={"matmul_flops": {"bfloat16": measured.matmul_flops["bfloat16"] * 3}})
    seen = [Observation(facts, policy, simulate(policy, facts, slow.model_copy(update={"efficiency": 1.0})).step_s)]
    found = calibrate(measured, seen)
    assert found.efficiency == 1.0
    assert found.matmul_flops["bfloat16"] == pytest.approx(3 * measured.matmul_flops["bfloat16"], rel=0.02)


def test_calibration_without_observations_changes_nothing() -> None:
    assert calibrate(PROFILE, []) is PROFILE


def test_the_batch_with_the_best_prediction() -> None:
    def plan_batch(batch: int):  # type: ignore[no-untyped-def]
        return make_plan(facts_of(CONFIG, batch=batch, length=16), PROFILE, Limits(planner="every_layer"))

    best = feasible_policy(predicted_batch(plan_batch, low=1, high=4))
    assert best.micro_batch == 4  # the weights' loads are shared by more rows
