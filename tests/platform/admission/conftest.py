"""Every test begins with nothing planned and nothing measured."""

from pathlib import Path

import pytest

from lazytrain.platform.admission import plan_job


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(plan_job, "_MADE", {})
