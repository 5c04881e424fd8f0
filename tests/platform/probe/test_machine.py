from pathlib import Path

import pytest
import torch

from lazytrain.jobs.errors import HardwareError
from lazytrain.platform.probe import DiskTier, HostMemory, Instruments, measure
from lazytrain.schedulers.hardware import hardware

GIB = 2**30


def instruments(**replaced: object) -> Instruments:
    given: dict[str, object] = {
        "memory": lambda: HostMemory(64 * GIB, 14 * GIB, "cgroup v2"),
        "disk": lambda path: DiskTier(path, True, "", 100 * GIB, 1e9, 5e8),
        "matmul_flops": lambda dtype, device: {"float32": 1e11, "bfloat16": 2e11}[dtype],
        "attention_flops": lambda dtype, device: {"float32": 5e10, "bfloat16": 6e10}[dtype],
        "host_bytes_s": lambda: 2e10,
        "update_parameters_s": lambda: 1e8,
        "link_bytes_s": lambda device: (2.5e10, 2.4e10),
        "operation_overhead_s": lambda device: 3e-4,
        "gpudirect_problem": lambda path: "",
    }
    return Instruments(**{**given, **replaced})  # type: ignore[arg-type]


def test_an_emulated_gpu_keeps_its_memory_and_links_and_gets_the_rest_measured() -> None:
    base = hardware("RTX3090").model_copy(update={"device": "emulated"})
    profile = measure(base, nvme_dir=Path("/n"), host_reserve_bytes=GIB, instruments=instruments()).profile
    assert profile.device == "emulated"
    assert (profile.gpu_memory_bytes, profile.h2d_bytes_s) == (base.gpu_memory_bytes, base.h2d_bytes_s)
    assert profile.matmul_flops == {"float32": 1e11, "bfloat16": 2e11}
    assert profile.attention_flops == {"float32": 5e10, "bfloat16": 6e10}
    assert profile.operation_overhead_s == 3e-4
    assert profile.host_memory_bytes == 49 * GIB
    assert profile.update_parameters_s == 1e8
    assert profile.nvme_bytes == 50 * GIB
    assert (profile.nvme_read_bytes_s, profile.nvme_write_bytes_s) == (1e9, 5e8)  # the disk is slower than the base's


@pytest.mark.parametrize("reason", ["unavailable (missing)", "refused (RAM-backed)"])
def test_a_disk_that_does_not_work_is_never_planned_with(reason: str) -> None:
    broken = instruments(disk=lambda path: DiskTier(path, False, reason))
    base = hardware("RTX3090", nvme="500GB").model_copy(update={"device": "emulated"})
    for wanted in (base, None):
        measured = measure(wanted, nvme_dir=Path("/n"), instruments=broken)
        assert measured.profile.nvme_bytes == 0
        assert measured.disk is not None
        assert measured.disk.reason == reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is measured instead")
def test_without_a_gpu_it_is_the_cpu() -> None:
    profile = measure(instruments=instruments()).profile
    assert profile.device == "cpu"
    assert profile.nvme_bytes == 0
    assert profile.gpu_memory_bytes == 50 * GIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_cuda_profile_needs_a_cuda_device() -> None:
    with pytest.raises(HardwareError, match="no CUDA device"):
        measure(hardware("H800"), instruments=instruments())


def test_the_real_instruments_give_sane_rates(tmp_path: Path) -> None:
    """On any machine of the last fifteen years, a laptop or a server: nothing zero, nothing impossible."""
    use = Instruments()
    assert 1e8 < use.matmul_flops("float32", device=torch.device("cpu"), seconds=0.01) < 1e14
    assert 1e7 < use.attention_flops("float32", device=torch.device("cpu"), seconds=0.01) < 1e14
    assert 1e-6 < use.operation_overhead_s(device=torch.device("cpu"), seconds=0.01) < 1.0
    assert 1e7 < use.host_bytes_s() < 1e13
    assert 1e4 < use.update_parameters_s() < 1e12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda() -> None:
    profile = measure().profile
    assert profile.device == "cuda"
    assert profile.h2d_bytes_s > 1e9
    assert profile.matmul_flops["bfloat16"] > profile.matmul_flops["float32"]


@pytest.mark.parametrize("problem, works", [("", True), ("", False), ("nvidia-fs is not loaded", True)])
def test_gpudirect_is_planned_with_where_gpu_and_disk_have_it(
    problem: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H800")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 81 * GIB))
    use = instruments(
        disk=lambda path: DiskTier(path, works, "" if works else "unavailable (full)", GIB, 1e9, 1e9),
        matmul_flops=lambda dtype, device: 1e11,
        attention_flops=lambda dtype, device: 1e11,
        pinned_limit_bytes=lambda memory, device: None,
        gpudirect_problem=lambda path: problem,
    )
    assert measure(nvme_dir=Path("/n"), instruments=use).profile.gpudirect == (works and not problem)
    assert not measure(instruments=use).profile.gpudirect
