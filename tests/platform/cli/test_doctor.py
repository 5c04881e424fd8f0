import json
import socket
from pathlib import Path

import pytest

from lazytrain.platform.cli import doctor
from lazytrain.platform.cli.app import run
from lazytrain.platform.cli.doctor import Finding, all_checks, run_check
from lazytrain.platform.probe.disk import DiskTier


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYTRAIN_HOME", str(tmp_path))


def test_this_installation_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json", "--nvme-dir", str(tmp_path)]) in (0, 1)  # 1 where the temporary files are in RAM
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert set(checks) == set(all_checks(None))
    for name in ("Python", "torch", "transformers", "planner", "optimizer", "bitsandbytes", "Ray", "MLflow"):
        assert checks[name]["verdict"] == "ok", checks[name]


def test_a_library_that_is_broken_is_a_finding_with_a_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Finding:
        raise OSError("libcudart.so.12: cannot open\nmore")

    monkeypatch.setattr(doctor, "all_checks", lambda nvme: {"bitsandbytes": broken})
    assert run(["doctor"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "OSError: libcudart.so.12: cannot open" in shown
    assert "pip install --force-reinstall bitsandbytes" in shown


def test_a_directory_that_cannot_be_a_tier_fails() -> None:
    finding = run_check("NVMe", all_checks(Path("/no/such/directory"))["NVMe"])
    assert finding.verdict == "failed"
    assert "unavailable (missing)" in finding.found
    assert finding.fix


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        monkeypatch.setattr(doctor, "_RAY_PORT", holder.getsockname()[1])
        finding = run_check("ports", all_checks(None)["ports"])
    assert finding.verdict == "warning"
    assert str(doctor._RAY_PORT) in finding.found
    assert "ss -ltnp" in finding.fix


def test_buffered_io_on_the_nvme_directory_is_said_with_the_reason(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, True, "", 10**12, 2e9, 1e9)
    monkeypatch.setattr("lazytrain.platform.probe.disk.probe_disk", lambda directory: tier)
    monkeypatch.setattr("lazytrain.jobs.executor.stores.nvme.direct_io_problem", lambda directory: "it is a test")
    finding = run_check("NVMe", all_checks(tmp_path)["NVMe"])
    assert (finding.verdict, bool(finding.fix)) == ("warning", True)
    assert "buffered I/O, because it is a test" in finding.found
    monkeypatch.setattr("lazytrain.jobs.executor.stores.nvme.direct_io_problem", lambda directory: "")
    assert run_check("NVMe", all_checks(tmp_path)["NVMe"]).verdict == "ok"
