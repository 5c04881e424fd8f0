"""Hardware profiles: known GPUs, profile files, and everything that must be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import HardwareError, InputError, ModelError
from lazytrain.schedulers.hardware import (
    Budgets,
    HardwareProfile,
    hardware,
    known_gpus,
    known_models,
    model_config,
    same_gpu,
)

COPIES = {
    "gpu": "0",
    **{f"{which}{way}_bytes_s": 1e9 for which in ("", "both_", "all_", "all_both_") for way in ("h2d", "d2h")},
}
PARAMETERS = {
    "qwen2.5-3b": 3.086e9,
    "qwen2.5-7b": 7.616e9,
    "qwen2.5-14b": 14.77e9,
    "qwen3.6-27b": 26.9e9,
    "gpt-oss-120b": 116.8e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3.1-70b": 70.55e9,
}


@pytest.mark.parametrize("spelling", ["RTX3090", "rtx 3090", "NVIDIA GeForce RTX 3090", "rtx-3090", "3090"])
def test_usual_spellings_name_the_same_gpu(spelling: str) -> None:
    profile = hardware(spelling)
    assert profile.name == profile.kind == "RTX3090"
    assert profile.gpu_memory_bytes == 24 << 30
    assert profile == hardware("RTX3090")


def test_driver_names_of_data_centre_gpus() -> None:
    assert hardware("NVIDIA H100 80GB HBM3").kind == "H100"
    assert hardware("NVIDIA A100-SXM4-80GB").kind == "A100-80GB"
    assert hardware("NVIDIA H200").kind == "H200"


@pytest.mark.parametrize("name,near", [("RTX3091", "RTX3090"), ("H8000", "H800"), ("A100", "A100-80GB")])
def test_an_unknown_gpu_is_refused_with_the_nearest_names(name: str, near: str) -> None:
    with pytest.raises(HardwareError, match=name) as caught:
        hardware(name)
    assert near in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", known_gpus())
def test_every_known_gpu_makes_a_plausible_profile(name: str) -> None:
    profile = hardware(name)
    assert 16 << 30 < profile.gpu_memory_bytes < 256 << 30
    assert profile.matmul_flops["bfloat16"] > profile.matmul_flops["float32"] > 1e13
    assert profile.gpu_budget_bytes < profile.gpu_memory_bytes
    assert profile.flops("bfloat16") == profile.matmul_flops["bfloat16"] * profile.efficiency


def test_attention_has_a_rate_of_its_own_where_it_was_measured() -> None:
    profile = hardware("H800")
    assert profile.attention("bfloat16") == profile.flops("bfloat16")
    measured = profile.model_copy(update={"attention_flops": {"bfloat16": 1e14}})
    assert measured.attention("bfloat16") == 1e14 * measured.efficiency
    assert measured.attention("float32") == measured.flops("float32")
    twice = measured.model_copy(update=measured.faster(2.0))
    assert (twice.attention("bfloat16"), twice.flops("bfloat16")) == (
        2 * measured.attention("bfloat16"),
        2 * measured.flops("bfloat16"),
    )


def test_overrides_replace_single_facts() -> None:
    profile = hardware("H800", gpu_memory="70GB", host_memory="256GiB", nvme="1TB", h2d_gbps=12, host_gbps=160)
    assert (profile.gpu_memory_bytes, profile.host_memory_bytes, profile.nvme_bytes) == (70 * 10**9, 256 << 30, 10**12)
    assert (profile.h2d_bytes_s, profile.d2h_bytes_s) == (12e9, hardware("H800").d2h_bytes_s)
    assert profile.update_parameters_s == 1e10
    assert profile.digest != hardware("H800").digest
    for bad in ({"h2d_gbps": 0.0}, {"efficiency": 1.5}):
        with pytest.raises(HardwareError, match="H800"):
            hardware("H800", **bad)
    with pytest.raises(InputError):
        hardware("H800", gpu_memory="seventy")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"gpu_memory": 0}, "gpu_memory_bytes 0"),
        ({"h2d_gbps": 1e-300}, "h2d_bytes_s 1e-291"),  # a copy of one byte would take for ever
        ({"h2d_gbps": 1e300}, "h2d_bytes_s inf"),
        ({"host_gbps": float("nan")}, "host_bytes_s nan"),
        ({"efficiency": 1.5}, "efficiency 1.5"),
    ],
)
def test_what_was_asked_for_and_cannot_be_is_named_with_its_value(asked: dict[str, float], words: str) -> None:
    with pytest.raises(HardwareError, match=f"H800 cannot have {words}") as caught:
        hardware("H800", **asked)  # type: ignore[arg-type]
    assert "another" in caught.value.hint


@pytest.mark.parametrize("rate", [0, -1.0, 1e-300, 1e300])
def test_a_profile_whose_matrix_rate_gives_no_finite_times_is_refused(tmp_path: Path, rate: float) -> None:
    path = tmp_path / "node.json"
    path.write_text(json.dumps(hardware("H800").model_dump() | {"matmul_flops": {"bfloat16": rate}}))
    with pytest.raises(HardwareError, match=r"matmul_flops\.bfloat16"):
        hardware(path)


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b", "[" * 5000])
def test_what_cannot_be_a_path_is_no_gpu(name: str) -> None:
    with pytest.raises(HardwareError, match="no GPU is called") as caught:
        hardware(name)
    assert len(caught.value.message) < 120


def test_a_profile_file_is_read_back(tmp_path: Path) -> None:
    profile = hardware("L40S", nvme="2TB")
    path = tmp_path / "node.json"
    path.write_text(profile.canonical_json())
    assert hardware(path) == hardware(str(path)) == profile
    assert hardware(path).digest == profile.digest
    assert hardware(path, nvme=0).nvme_bytes == 0


def test_bad_profile_files_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    with pytest.raises(HardwareError, match="cannot read"):
        hardware(path)
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(HardwareError, match="not JSON"):
            hardware(path)
    path.write_text(json.dumps(hardware("H800").model_dump() | {"h2d_bytes_s": -1, "gpu_memory_bytes": "much"}))
    with pytest.raises(HardwareError, match=r"gpu_memory_bytes: .*h2d_bytes_s: "):
        hardware(path)
    path.write_text("[]")
    with pytest.raises(HardwareError, match="file: "):
        hardware(path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"h2d_bytes_s": True}, "h2d_bytes_s: .*, not True"),
        ({"d2h_bytes_s": "1e9"}, "d2h_bytes_s: .*, not '1e9'"),
        ({"nvme_read_bytes_s": 0}, "nvme_read_bytes_s: .*, not 0"),
        ({"host_bytes_s": float("inf")}, "host_bytes_s: .*, not inf"),
        ({"update_parameters_s": float("nan")}, "update_parameters_s: .*, not nan"),
        ({"matmul_flops": {"bfloat16": True}}, r"matmul_flops\.bfloat16: .*, not True"),
        ({"efficiency": True}, "efficiency: .*, not True"),
        ({"gpu_memory_bytes": "80"}, "gpu_memory_bytes: .*, not '80'"),
        ({"nvme_bytes": True}, "nvme_bytes: .*, not True"),
        ({"host_memory_bytes": 1.5}, "host_memory_bytes: .*, not 1.5"),
        ({"pinned_limit_bytes": float("inf")}, "pinned_limit_bytes: .*, not inf"),
        ({"gpudirect": "yes"}, "gpudirect: .*, not 'yes'"),
        ({"copies": [COPIES | {"all_h2d_bytes_s": float("inf")}]}, r"copies\.0\.all_h2d_bytes_s: .*, not inf"),
        ({"copies": [COPIES | {"h2d_bytes_s": "12"}]}, r"copies\.0\.h2d_bytes_s: .*, not '12'"),
    ],
)
def test_what_is_no_number_in_a_profile_file_is_not_taken_for_one(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    path = tmp_path / "node.json"
    path.write_text(json.dumps(hardware("H800").model_dump() | fields))
    with pytest.raises(HardwareError, match=words):
        hardware(path)


def test_large_amounts_may_be_written_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    fields = {"host_memory_bytes": 64e9, "nvme_bytes": 1e12, "h2d_bytes_s": 12_000_000_000, "copies": [COPIES]}
    path.write_text(json.dumps(hardware("H800").model_dump() | fields))
    profile = hardware(path)
    assert (profile.host_memory_bytes, profile.nvme_bytes, profile.h2d_bytes_s) == (64 * 10**9, 10**12, 12e9)
    assert profile.copies[0].both_d2h_bytes_s == 1e9


def test_a_rate_that_nobody_measured_is_refused() -> None:
    with pytest.raises(HardwareError, match="float16"):
        hardware("H800").flops("float16")


def test_budgets_come_from_the_profile_unless_given() -> None:
    profile = hardware("H800")
    assert Budgets.of(profile).by_tier() == {"gpu": profile.gpu_budget_bytes, "host": 2048 << 30, "nvme": 0}
    assert Budgets.of(profile, gpu_memory="1GB", nvme=5).by_tier()["gpu"] == 10**9
    emulated = HardwareProfile(**(profile.model_dump() | {"device": "emulated"}))
    assert emulated.gpu_budget_bytes == profile.gpu_memory_bytes


def test_model_shapes_are_new_dicts_and_unknown_ones_refused() -> None:
    model_config("qwen2.5-7b")["hidden_size"] = 1
    assert model_config("Qwen2.5-7B")["hidden_size"] == 3584
    with pytest.raises(ModelError, match=r"qwen2\.5-8b") as caught:
        model_config("qwen2.5-8b")
    assert "qwen2.5-7b" in caught.value.hint


def test_each_model_shape_builds_with_the_right_number_of_parameters() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    assert set(PARAMETERS) == set(known_models())
    for name, expected in PARAMETERS.items():
        config = model_config(name)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
        assert [type(model).__name__] == config["architectures"]
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("RTX3090", "NVIDIA-GeForce-RTX-3090", True),
        ("H800", "NVIDIA H800 80GB HBM3", True),
        ("H800", "NVIDIA H800 80GB PCIe", False),
        ("RTX3090", "RTX4090", False),
        ("demo-gpu", "demo gpu", True),
        ("demo-gpu", "other-gpu", False),
    ],
)
def test_names_of_the_same_gpu(one: str, other: str, same: bool) -> None:
    assert same_gpu(one, other) is same
    assert same_gpu(other, one) is same
