"""The folder that the demo writes is a whole, small job."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lazytrain.jobs.data import Prepared, prepare
from lazytrain.jobs.spec import JobSpec, load_spec
from lazytrain.platform.demo import write_inputs


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    return load_spec(write_inputs(tmp_path_factory.mktemp("demo") / "new", seed=3))


@pytest.fixture(scope="module")
def prepared(spec: JobSpec) -> Prepared:
    return prepare(spec.data, AutoTokenizer.from_pretrained(spec.model.path))


def test_model_is_a_small_random_qwen3(spec: JobSpec) -> None:
    model = AutoModelForCausalLM.from_pretrained(spec.model.path)
    assert model.config.model_type == "qwen3"
    assert model.config.num_hidden_layers >= 6
    assert model.num_parameters() < 3_000_000
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_every_row_is_usable_and_short(spec: JobSpec, prepared: Prepared) -> None:
    report = prepared.report
    assert (report.refused, report.truncated) == (0, 0)
    assert report.longest <= spec.data.max_length <= 64
    assert report.eval_rows == 200


def test_the_whole_response_is_learned(spec: JobSpec, prepared: Prepared) -> None:
    tokenizer = AutoTokenizer.from_pretrained(spec.model.path)
    rows = prepared.eval
    for ids, start, answer in zip(rows.input_ids, rows.answer_starts, rows.answers, strict=True):
        assert tokenizer.decode(ids[start:]) == answer + tokenizer.eos_token
        assert len(ids) - start <= spec.evaluate.max_new_tokens


def test_digits_are_tokens_of_their_own(spec: JobSpec) -> None:
    tokenizer = AutoTokenizer.from_pretrained(spec.model.path)
    assert tokenizer.tokenize("47+38=85") == list("47+38=85")
    text = "Ünknown words, 🙂\nand lines survive: 12"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_equal_seeds_write_equal_files(spec: JobSpec, tmp_path: Path) -> None:
    def digests(folder: Path) -> dict[str, str]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    state = torch.random.get_rng_state()
    job = write_inputs(tmp_path, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    first = digests(Path(spec.model.path).parent)
    assert digests(job.parent) == first
    other = digests(write_inputs(tmp_path / "other", seed=4).parent)
    assert all(other[name] != first[name] for name in ("train.jsonl", "eval.jsonl", "model/model.safetensors"))
