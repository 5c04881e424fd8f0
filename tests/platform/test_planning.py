import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lazytrain.jobs.errors import DoesNotFit, HardwareError, InputError, ModelError
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.planning import (
    Limits,
    Observation,
    calibrate,
    device_kind,
    emulated,
    facts_of,
    feasible_policy,
    find_model,
    make_plan,
    model_of,
    plain_training_bytes,
    predicted_batch,
    shape_of,
    uncollected,
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


def test_a_model_is_found_by_shape_file_and_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    assert find_model("qwen2.5-7b")["model_type"] == "qwen2"  # type: ignore[index]
    assert find_model(str(file)) == CONFIG
    assert find_model(str(tmp_path)).hidden_size == 64  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["not json", "[]", "{}", '{"model_type": 3}', "[" * 100_000, " " * (1 << 25), "\0"])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelError, match="not a model configuration"):
        find_model(str(file))


@pytest.mark.parametrize("config", [{**CONFIG, "num_hidden_layers": "three"}, [], None])
def test_a_folder_whose_configuration_is_none_is_named(tmp_path: Path, config: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"no model configuration at {tmp_path}: .+"):
        find_model(str(tmp_path))


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


@pytest.mark.parametrize("name", ["", "a" * 5000, "a\0b", "no/such/folder", "/no/such", "../no", "[red]", "a b"])
def test_what_is_neither_a_path_nor_a_hub_id_is_said_in_a_line(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder") as caught:
        find_model(name)
    assert len(caught.value.message) < 200 and "\n" not in caught.value.message and "config.json" in caught.value.hint


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def nobody(url: str, **_: object) -> None:
        asked.append(url)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", nobody)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    with pytest.raises(ModelError, match=r"no file or folder, and the hub does not answer \(Name or service"):
        find_model("somebody/no-such-model")
    assert len(asked) == 1 and asked[0].endswith("/somebody/no-such-model/resolve/main/config.json")


def test_a_hub_that_knows_no_such_model_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(name: str, **_: object) -> None:
        raise OSError(f"{name} is not a model identifier listed on the hub")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", said)
    with pytest.raises(ModelError, match="is not a model identifier"):
        find_model("somebody/no-such-model")


def test_code_that_a_model_brings_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "model_type": "own", "auto_map": {"AutoConfig": "own.Config"}})
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match="brings code of its own") as caught:
        find_model(str(tmp_path))
    assert "trust_remote_code: true" in caught.value.hint
    assert not (tmp_path / "ran").exists()


def test_a_configuration_with_an_infinite_value_has_a_shape_to_be_known_by(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "time_step_limit": [0.0, float("inf")]}))
    assert shape_of(find_model(str(file))) == {**CONFIG, "time_step_limit": [0.0, "Infinity"]}


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_the_solver_has_a_time_that_ends(seconds: float) -> None:
    with pytest.raises(InputError, match="the solver cannot have"):
        Limits().override(solve_seconds=seconds)


def test_limits_come_from_the_job_file(tiny_job: Path) -> None:
    limits = Limits.of(load_spec(tiny_job, ("plan.gpu_memory=1GB", "plan.nvme=null")))
    assert (limits.gpu_memory, limits.host_memory, limits.nvme) == (10**9, None, 0)
    changed = limits.override(host_memory="2GB", planner=None)
    assert (changed.gpu_memory, changed.host_memory, changed.planner) == (10**9, "2GB", limits.planner)


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


def test_garbage_is_collected_again_after_imports() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), uncollected():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()  # as it was
        frozen = gc.get_freeze_count()
        with uncollected():
            cycle: list[object] = []
            cycle.append(cycle)
        assert gc.get_freeze_count() == frozen  # nothing was imported
    finally:
        gc.enable()


def test_packages_that_no_facts_depend_on_are_spared() -> None:
    script = (
        "import importlib.util; from lazytrain.platform.planning import spare_imports\n"
        "spare_imports()\n"
        "assert importlib.util.find_spec('scipy') is None\n"
        "try: import scipy\n"
        "except ModuleNotFoundError: print('spared')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "spared\n"), ended.stderr
