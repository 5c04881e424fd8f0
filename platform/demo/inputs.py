"""Everything the demo needs, written into a folder without a download: model, tokenizer, rows and job file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .problems import Row, make_problems

_TRAIN_ROWS = 8_800
_EVAL_ROWS = 200
_VOCABULARY = 768
_END, _PADDING = "<|end|>", "<|pad|>"

_JOB = """\
# Teaches a small model with random weights to solve word problems about two-digit sums.
name: demo
model: {path: model, dtype: float32}
data:
  train: [{path: train.jsonl, format: query/response}]
  eval: [{path: eval.jsonl, format: query/response}]
  max_length: 32
train: {epochs: 1, batch: auto, learning_rate: 2e-3, schedule: cosine, warmup: 0.05, weight_decay: 0.01, seed: SEED}
plan: {planner: paper, nvme: nvme}
evaluate: {metric: exact_match, answer: "The answer is:", max_new_tokens: 32, batch: 200}
output: {dir: run}
"""


def write_inputs(directory: str | Path, seed: int) -> Path:
    """Write ``model/``, ``train.jsonl``, ``eval.jsonl`` and ``job.yaml`` into a folder; return the path of the last."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    problems = make_problems(train=_TRAIN_ROWS, eval=_EVAL_ROWS, seed=seed)
    _write_rows(folder / "train.jsonl", problems.train)
    _write_rows(folder / "eval.jsonl", problems.eval)
    tokenizer = _make_tokenizer(f"{row['query']}\n{row['response']}" for row in problems.train[:4000])
    tokenizer.save_pretrained(folder / "model")
    _make_model(tokenizer, seed).save_pretrained(folder / "model")
    job = folder / "job.yaml"
    job.write_text(_JOB.replace("SEED", str(seed)), encoding="utf-8")
    return job


def _write_rows(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _make_tokenizer(texts: Iterable[str]) -> Any:
    """Byte-level BPE that keeps digits apart and lets whole phrases become one token, so that rows are short."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_PADDING, _END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=_END, pad_token=_PADDING)


def _make_model(tokenizer: Any, seed: int) -> Any:
    """A Qwen3 of about a million parameters whose weights depend on the seed alone."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=10,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
