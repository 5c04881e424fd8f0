from pathlib import Path

import pytest

from lazytrain.platform.demo import inputs


@pytest.fixture
def tiny_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's job file with a hundredth of its rows."""
    monkeypatch.setattr(inputs, "_TRAIN_ROWS", 240)
    monkeypatch.setattr(inputs, "_EVAL_ROWS", 8)
    return inputs.write_inputs(tmp_path / "job", seed=0)
