import json
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.policy import Policy
from lazytrain.platform.cli.app import run

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


PROMISED = {
    "solver": {"planner", "backend", "status", "objective_s", "bound_s", "gap", "seconds"},
    "policy": {
        "schema", "model_digest", "hardware_digest", "micro_batch", "accumulation", "sequence_length", "boundaries",
        "layers", "weight_slots", "optimizer_home", "gradient_home",
    },
    "boundary": {"index", "home"},
    "layer": {"index", "internals", "internals_home", "resident"},
    "predicted": {
        "step_s", "tokens_per_s", "tflops_6n", "compute_units", "peak_gpu_bytes", "peak_host_bytes", "nvme_bytes",
        "host_bytes_per_parameter", "exposed_s",
    },
}  # fmt: skip
"""Names that ``plan --json`` gives, whatever else it gives; of a rule it gives those of a prediction."""
PROMISED_BASELINES = ("megatrain", "every_layer", "paper")


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == code
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_promised_keys(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "policy.json", tmp_path / "map.html"
    shape = ["--model", model, "--gpu", "rtx 3090", "--batch", "2", "--length", "16"]
    answer = planned([*shape, "--out", str(out), "--html", str(page)], capsys)
    assert answer["notes"] == []
    assert "boundary 4: on the GPU" in page.read_text()
    assert answer["feasible"] is True
    assert answer["solver"]["planner"] == "full"
    policy = answer["policy"]
    promised = {
        "solver": answer["solver"], "policy": policy, "boundary": policy["boundaries"][0], "layer": policy["layers"][0],
        "predicted": answer["predicted"], **{name: answer["baselines"][name] for name in PROMISED_BASELINES},
    }  # fmt: skip
    for name, given in promised.items():
        assert PROMISED.get(name, PROMISED["predicted"]) <= set(given), name
    assert set(answer["predicted"]["exposed_s"]) == {"h2d", "d2h", "nvme_read", "nvme_write", "cpu"}
    assert policy["boundaries"][0] == {"index": 0, "home": "gpu"}
    saved = Policy.load(out)
    assert [b.home for b in saved.boundaries] == [b["home"] for b in answer["policy"]["boundaries"]]


def test_what_does_not_fit_is_exit_3_with_reasons(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--model", model, "--gpu", "H800", "--batch", "2", "--length", "16", "--gpu-memory", "10KB"]
    answer = planned(shape, capsys, code=3)
    assert answer["feasible"] is False
    (reason,) = [r for r in answer["reasons"] if r["resource"] == "gpu_memory"]
    assert reason["available_bytes"] == 10_000
    assert reason["shortfall_bytes"] == reason["needed_bytes"] - 10_000 > 0
    assert set(reason) == {"resource", "needed_bytes", "available_bytes", "shortfall_bytes", "hint"} and reason["hint"]


def test_options_override_the_profile(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--model", model, "--gpu", "H800", "--batch", "64", "--length", "64", "--planner", "every_layer"]
    fast = planned(shape, capsys)
    slow = planned([*shape, "--h2d-gbps", "0.001"], capsys)
    assert slow["predicted"]["step_s"] > 10 * fast["predicted"]["step_s"]


def test_for_a_person(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(model).write_text(json.dumps({**TINY, "max_position_embeddings": 8}))
    assert run(["plan", "--model", model, "--gpu", "H800", "--batch", "2", "--length", "16"]) == 0
    shown = capsys.readouterr().out
    assert "sequences of 16 tokens are longer than the 8 that the model is for" in " ".join(shown.split())
    for words in ("boundaries:", "on the GPU", "recomputed", "this plan", "megatrain", "peak host", "optimizer state"):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "MODEL", "--gpu", "RTX 390", "--batch", "2", "--length", "16"], "RTX 390"),
        (["--model", "no/such/dir", "--gpu", "H800", "--batch", "2", "--length", "16"], "no/such/dir"),
        (["--model", "MODEL", "--batch", "2", "--length", "16"], "which GPU"),
        (["--model", "MODEL", "--gpu", "H800"], "--batch, --length"),
        (["none.yaml", "--gpu", "H800"], "none.yaml"),
        (["--model", "MODEL", "--gpu", "H800", "--batch", "2", "--length", "16", "--planner", "magic"], "magic"),
        (["--model", "MODEL", "--gpu", "H800", "--batch", "2", "--length", "16", "--nvme", "lots"], "lots"),
        (["--model", "MODEL", "--gpu", "H800", "--gpu-memory", "0"], "gpu_memory_bytes 0"),
        (["--model", "MODEL", "--gpu", "H800", "--host-memory", "1e400GiB"], "1e400GiB"),
        (["--model", "MODEL", "--gpu", "H800", "--h2d-gbps", "nan"], "h2d_bytes_s nan"),
        (["--model", "MODEL", "--gpu", "H800", "--solve-seconds", "inf"], "inf seconds"),
        (["--model", "MODEL", "--gpu", "H800", "--set", "train.batch=2"], "--set changes a job file"),
        (["--model", "MODEL", "--gpu", "H800", "--html", "/"], "cannot write /: it is a folder"),
        (["--model", "MODEL", "--gpu", "H800", "--out", "/no/such/policy.json"], "its folder does not exist"),
    ],
)
def test_wrong_input_is_exit_2(
    arguments: list[str], words: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [model if argument == "MODEL" else argument for argument in arguments]
    assert words in planned(given, capsys, code=2)["error"]["message"]


@pytest.mark.parametrize("option", ["--out", "--html"])
def test_a_full_disk_is_said_so(option: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--model", model, "--gpu", "H800", "--batch", "2", "--length", "16"]
    error = planned([*shape, option, "/dev/full"], capsys, code=2)["error"]
    assert error["message"] == "cannot write /dev/full: No space left on device"


def test_simulate_reads_the_policy_and_writes_a_trace(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, trace = tmp_path / "policy.json", tmp_path / "trace.json"
    planned(["--model", model, "--gpu", "H800", "--batch", "2", "--length", "16", "--out", str(out)], capsys)
    command = ["simulate", str(out), "--gpu", "H800", "--model", model]
    assert run([*command, "--trace", str(trace), "--html", str(tmp_path / "step.html"), "--json"]) == 0
    assert "Predicted timeline" in (tmp_path / "step.html").read_text()
    answer = json.loads(capsys.readouterr().out)
    assert answer["step_s"] > 0
    assert set(answer["peak_bytes"]) == {"gpu", "host", "nvme"}
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert any(name.startswith("forward") for name in names)
    assert run(command) == 0
    assert "compute waits" in capsys.readouterr().out


def test_simulate_refuses_a_policy_of_another_model(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "policy.json"
    planned(["--model", model, "--gpu", "H800", "--batch", "2", "--length", "16", "--out", str(out)], capsys)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**TINY, "intermediate_size": 256}))
    assert run(["simulate", str(out), "--gpu", "H800", "--model", str(other), "--json"]) == 1
    assert "policy was made for model" in json.loads(capsys.readouterr().out)["error"]["message"]
