from pathlib import Path

import pytest

from lazytrain.platform.cli import job
from lazytrain.platform.probe import HostMemory, Instruments, measure


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rates are looked up instead of measured: the measuring has tests of its own."""
    monkeypatch.setenv("LAZYTRAIN_HOME", str(tmp_path / "home"))
    fixed = Instruments(
        memory=lambda: HostMemory(2**33, 0, "machine"),
        matmul_flops=lambda dtype, device: 4e10,
        host_bytes_s=lambda: 1e10,
        update_parameters_s=lambda: 5e7,
        operation_overhead_s=lambda device: 0.0,
    )
    monkeypatch.setattr(job, "measure", lambda base, **given: measure(base, **given, instruments=fixed))
