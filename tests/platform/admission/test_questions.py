"""Planning a shape, as the planning process does it."""

import json
from pathlib import Path

from lazytrain.platform.admission.measuring import Here
from lazytrain.platform.admission.questions import plan_shape
from lazytrain.schedulers.hardware import hardware

ASK = {"batch": 2, "length": 64, "dtype": "bfloat16", "planner": "every_layer", "solve_seconds": 5.0}


def config(folder: Path) -> str:
    """A tiny Llama's configuration file."""
    path = folder / "config.json"
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 128, **small}))
    return str(path)


def test_a_plan_with_its_timeline_on_a_known_and_on_a_measured_machine(tmp_path: Path) -> None:
    known = plan_shape({**ASK, "model": config(tmp_path), "gpu": "H800"}, Here(tmp_path))
    assert known["feasible"]
    assert known["model"]["layers"] == 3
    assert known["timeline"]["spans"]
    assert known["timeline"]["step_s"] > 0
    json.dumps(known, allow_nan=False)
    slow = hardware("H800").model_copy(update={"name": "mine", "h2d_bytes_s": 1e6}).model_dump(mode="json")
    measured = plan_shape({**ASK, "model": config(tmp_path), "gpu": "H800", "profile": slow}, Here(tmp_path))
    assert measured["machine"]["name"] == "mine"
    assert measured["predicted"]["step_s"] > 10 * known["predicted"]["step_s"]


def test_what_does_not_fit_says_why(tmp_path: Path) -> None:
    answer = plan_shape({**ASK, "model": config(tmp_path), "gpu": "H800", "gpu_memory": "1KB"}, Here(tmp_path))
    assert not answer["feasible"]
    assert answer["reasons"][0]["resource"] == "gpu_memory"
    assert answer["timeline"] is None
