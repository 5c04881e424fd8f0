"""A tiny model that can learn sums of digits, its rows, and the job file that names both."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = ["<pad>", "<end>", *"0123456789", "add", "and", "The", "answer", "is", ":", "####"]


def write_model(folder: Path, vocabulary: int = len(WORDS)) -> None:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(True)])
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def write_job(tmp_path: Path) -> Path:
    """A job file for sums of digits, with the model and the rows it names."""
    write_model(tmp_path / "model")
    rows = [{"query": f"add {a} and {b}", "response": f"The answer is : {a + b}"} for a in range(10) for b in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.yaml").write_text(
        textwrap.dedent("""\
        name: tiny
        model: {path: model, dtype: float32}
        data: {train: [{path: rows.jsonl}], split: {train: 0.8, eval: 0.2, seed: 1}, max_length: 32}
        train: {epochs: 2, batch: 8, learning_rate: 3e-3, seed: 3}
        evaluate: {answer: "The answer is :", max_new_tokens: 8, every: 0.5, limit: 4}
        output: {dir: run, save_every: 4}
        """)
    )
    return tmp_path / "job.yaml"


@pytest.fixture
def rewrite_model() -> Callable[..., None]:
    return write_model


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job file like `job`, for one run that is compared with many."""
    return write_job(tmp_path_factory.mktemp("undisturbed"))
