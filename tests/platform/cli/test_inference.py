"""``evaluate`` and ``generate`` on the demo's model."""

import json
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.train import train
from lazytrain.platform.cli.app import run


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert run([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_evaluates_the_trained_model_as_the_run_did(
    tiny_job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(load_spec(tiny_job, ["train.max_steps=2", "train.batch=4", "evaluate.limit=4"]), device="cpu")
    short = ["--set", "evaluate.limit=4", "--device", "cpu"]
    got = answer(["evaluate", str(tiny_job), *short], capsys)
    assert got["model"] == str(Path(result.run_dir) / "model")
    assert (got["exact_match"], got["total"]) == (result.exact_match, 4)
    assert got["interval"][0] <= got["exact_match"] <= got["interval"][1]
    rows = [json.loads(line) for line in Path(got["verdicts"]).read_text().splitlines()]
    assert rows == [json.loads(line) for line in (Path(result.run_dir) / "verdicts.jsonl").read_text().splitlines()]
    assert {"prompt", "output", "expected", "predicted", "correct"} <= rows[0].keys()
    streamed = answer(["evaluate", result.run_dir, *short, "--out", str(tmp_path / "v.jsonl")], capsys)
    assert streamed | {"verdicts": ""} == got | {"verdicts": ""}


def test_generates(tiny_job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_job.parent / "model")
    fixed = ["--device", "cpu", "--dtype", "float32", "--max-new-tokens", "6"]
    (tmp_path / "prompts.txt").write_text("What is 2 plus 2?\n\nWhat is 3 plus 3?\n")
    greedy = answer(["generate", model, "What is 1 plus 1?", "--file", str(tmp_path / "prompts.txt"), *fixed], capsys)
    assert [row["prompt"] for row in greedy["outputs"]] == [f"What is {n} plus {n}?" for n in (1, 2, 3)]
    warm = ["generate", model, "What is 1 plus 1?", "--temperature", "2", *fixed]
    first, second = (answer([*warm, "--seed", seed], capsys)["outputs"][0]["output"] for seed in ("1", "2"))
    assert first != second
    assert answer([*warm, "--seed", "1"], capsys)["outputs"][0]["output"] == first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "MODEL", "a", "--top-p", "0"], "top_p"),
        (["generate", "MODEL", "a", "--dtype", "int3"], "int3"),
        (["generate", "MODEL", "a", "--device", "tpu"], "tpu"),
        (["generate", "MODEL", "--file", "/no/such/file"], "/no/such/file"),
        (["generate", "/no/such/model", "a"], "/no/such/model"),
        (["evaluate", "JOB", "--set", "data.eval=[]", "--set", "data.split={train: 1.0}"], "no evaluation rows"),
    ],
)
def test_what_is_wrong_is_said(
    tiny_job: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"MODEL": str(tiny_job.parent / "model"), "JOB": str(tiny_job)}
    error = answer([given.get(argument, argument) for argument in arguments], capsys, 2)["error"]
    assert words in error["message"]
