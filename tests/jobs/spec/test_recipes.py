"""The recipes that people copy are valid job files, and train on rows of the kind they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lazytrain.jobs.spec import load_spec

RECIPES = sorted((Path(__file__).parents[3] / "deploy" / "recipes").glob("*.yaml"))
ROWS = {
    "query/response": {"query": "add 1 and 1", "response": "The answer is: 2"},
    "question/answer": {"question": "add 1 and 1", "answer": "1 and 1 is 2 #### 2"},
    "preference": {"prompt": "add 1 and 1", "chosen": "2", "rejected": "3"},
}


def test_there_are_recipes() -> None:
    assert {path.stem for path in RECIPES} >= {"metamathqa-qwen2.5-7b", "metamathqa-qwen3.6-27b", "gsm8k", "dpo"}


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_recipes_are_valid(path: Path) -> None:
    spec = load_spec(path)
    assert spec.name == path.stem
    assert spec.output.dir.endswith(f"runs/{path.stem}")
    assert (spec.train.objective == "dpo") == (spec.data.train[0].format == "preference")
    assert load_spec(path, ["train.batch=8"]).train.batch == 8


def test_the_papers_recipe_has_the_papers_numbers() -> None:
    spec = load_spec(next(path for path in RECIPES if path.stem == "metamathqa-qwen3.6-27b"))
    rows = 395_000  # of MetaMathQA
    split = spec.data.split
    assert split is not None
    assert -(-round(split.train * rows) // int(spec.train.batch)) == 3841
    assert (spec.train.learning_rate, spec.train.weight_decay, spec.train.seed) == (1e-5, 0.01, 42)
    assert (spec.optimizer.betas, spec.optimizer.eps, spec.train.max_grad_norm) == ((0.9, 0.999), 1e-8, 1.0)
    assert (spec.data.max_length, split.train, split.eval) == (1024, 0.7, 0.3)


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_recipes_train_on_rows_of_their_kind(path: Path, tmp_path: Path) -> None:
    """With a few rows from a file in place of the hub, and the tiny tokenizer of the demo."""
    from transformers import AutoTokenizer

    from lazytrain.jobs.data import prepare
    from lazytrain.jobs.objectives import objective_of
    from lazytrain.platform.demo import inputs

    spec = load_spec(path)
    kind = spec.data.train[0].format
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(ROWS[kind]) + "\n" for _ in range(4)))
    settings = [f"data.train=[{{path: {tmp_path / 'rows.jsonl'}, format: {kind}}}]"]
    settings += [f"data.eval=[{{path: {tmp_path / 'rows.jsonl'}, format: {kind}}}]"] if spec.data.eval else []
    local = load_spec(path, settings)
    model = inputs._make_tokenizer(["add 1 and 1 is 2", "The answer is: 2"])
    model.save_pretrained(tmp_path / "model")
    prepared = prepare(local.data, AutoTokenizer.from_pretrained(tmp_path / "model"))
    objective_of(local.train).check(prepared)
    assert len(prepared.train) > 0
