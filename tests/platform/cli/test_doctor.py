import json
import socket
import sys
from pathlib import Path

import pytest

from lazytrain.platform.cli import doctor
from lazytrain.platform.cli.app import run
from lazytrain.platform.cli.doctor import Finding, all_checks, run_check
from lazytrain.platform.cli.doctor_cluster import judge
from lazytrain.platform.cluster.survey import NodeReport
from lazytrain.platform.probe.disk import DiskTier
from lazytrain.platform.settings import Settings


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYTRAIN_HOME", str(tmp_path))


def test_this_installation_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json", "--nvme-dir", str(tmp_path)]) in (0, 1)  # 1 where the temporary files are in RAM
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert set(checks) == set(all_checks(Settings(), None))
    for name in ("Python", "torch", "transformers", "planner", "optimizer", "bitsandbytes", "Ray", "MLflow"):
        assert checks[name]["verdict"] == "ok", checks[name]


def test_a_library_that_is_broken_is_a_finding_with_a_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Finding:
        raise OSError("libcudart.so.12: cannot open\nmore")

    monkeypatch.setattr(doctor, "all_checks", lambda settings, nvme: {"bitsandbytes": broken})
    assert run(["doctor"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "OSError: libcudart.so.12: cannot open" in shown
    assert "pip install --force-reinstall bitsandbytes" in shown


def test_a_directory_that_cannot_be_a_tier_fails() -> None:
    finding = run_check("NVMe", all_checks(Settings(), Path("/no/such/directory"))["NVMe"])
    assert finding.verdict == "failed"
    assert "unavailable (missing)" in finding.found
    assert finding.fix


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        monkeypatch.setattr(doctor, "_RAY_PORT", holder.getsockname()[1])
        finding = run_check("ports", all_checks(Settings(), None)["ports"])
    assert finding.verdict == "warning"
    assert str(doctor._RAY_PORT) in finding.found
    assert "ss -ltnp" in finding.fix


def test_buffered_io_on_the_nvme_directory_is_said_with_the_reason(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, True, "", 10**12, 2e9, 1e9)
    monkeypatch.setattr("lazytrain.platform.probe.disk.probe_disk", lambda directory: tier)
    monkeypatch.setattr("lazytrain.jobs.executor.stores.nvme.direct_io_problem", lambda directory: "it is a test")
    finding = run_check("NVMe", all_checks(Settings(), tmp_path)["NVMe"])
    assert (finding.verdict, bool(finding.fix)) == ("warning", True)
    assert "buffered I/O, because it is a test" in finding.found
    monkeypatch.setattr("lazytrain.jobs.executor.stores.nvme.direct_io_problem", lambda directory: "")
    finding = run_check("NVMe", all_checks(Settings(), tmp_path)["NVMe"])
    assert finding.verdict == "ok"
    assert "no GPUDirect Storage: kvikio cannot be imported" in finding.found
    monkeypatch.setattr("lazytrain.jobs.executor.stores.gpudirect.problem_here", lambda directory: "")
    finding = run_check("NVMe", all_checks(Settings(), tmp_path)["NVMe"])
    assert finding.found.endswith("from the GPU too (GPUDirect Storage)")


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stands in for the driver's tool: what it prints and how it ends."""

    def make(said: str, code: int = 0) -> None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\nprintf '%s' '{said}'\nexit {code}\n", encoding="utf-8")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")

    return make


def test_gpus_that_only_the_driver_sees_are_a_failure_with_its_cause(nvidia, monkeypatch) -> None:
    nvidia("580.95.05, NVIDIA H800\n580.95.05, NVIDIA H800\n")
    assert doctor.doctor_machine.check_driver().found == "580.95.05: NVIDIA H800, NVIDIA H800"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.version.cuda", None)
    finding = doctor.doctor_machine.check_visible()
    assert (finding.verdict, finding.found) == ("failed", "0 of 2")
    assert "built for CPUs" in finding.fix
    monkeypatch.setattr("torch.version.cuda", "12.8")
    assert "driver 580.95.05 new enough for CUDA 12.8" in doctor.doctor_machine.check_visible().fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "unset it" in doctor.doctor_machine.check_visible().fix


def test_a_driver_that_does_not_answer_says_why(nvidia) -> None:
    nvidia("Failed to initialize NVML: Driver/library version mismatch", 18)
    finding = doctor.doctor_machine.check_driver()
    assert (finding.verdict, "version mismatch" in finding.found, bool(finding.fix)) == ("failed", True, True)


def test_limits_and_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = doctor.doctor_machine
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (1024, 4096))
    assert "ulimit -n 65536 (as root" in machine.check_open_files().fix
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 64 * 2**20}))
    assert machine.check_shared_memory(Settings(), tmp_path).verdict == "failed"
    assert "tmpfs" in machine.check_shared_memory(Settings(), tmp_path / "none").fix
    for state, verdict in ((0, "ok"), (5, "warning"), (-1, "warning")):
        monkeypatch.setattr(machine, "clock_state", lambda state=state: state)
        assert machine.check_clock().verdict == verdict
    monkeypatch.undo()
    assert machine.clock_state() in range(-1, 6)


def report(**changes: object) -> NodeReport:
    same = {"python": sys.version.split()[0]}
    base = {"name": "a", "kind": "H800", "gpus": 8, "versions": same, "skew_s": 0.2, "uncertainty_s": 0.01}
    return NodeReport(**{**base, "sees_folder": True, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({}, "ok", "8 x H800, clock +0.200 s"),
        ({"skew_s": -3.0}, "warning", "synchronise its clock"),
        ({"skew_s": -3.0, "uncertainty_s": 2.5}, "ok", "within 2.500 s"),
        ({"versions": {"python": "3.9.1"}}, "failed", "python 3.9.1 (here 3."),
        ({"sees_folder": False}, "warning", "must be the same folder on every node"),
        ({"kind": ""}, "warning", "node.sh"),
        ({"error": "the actor died"}, "failed", "the actor died"),
    ],
)
def test_every_node_is_judged_with_what_to_do(changes: dict[str, object], verdict: str, words: str) -> None:
    (finding,) = judge([report(**changes)], Settings())
    assert finding.verdict == verdict
    assert words in f"{finding.found} {finding.fix}"
    assert bool(finding.fix) == (verdict != "ok")


def test_a_cluster_that_does_not_answer_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(doctor, "all_checks", lambda settings, nvme: {})
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
    monkeypatch.setattr(
        "lazytrain.platform.cluster.local.ray.init", lambda **given: (_ for _ in ()).throw(ConnectionError("no"))
    )
    assert run(["doctor", "--json", "--ray-address", address]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["checks"]
    assert finding["name"] == "cluster" and address in finding["found"] and finding["fix"]
