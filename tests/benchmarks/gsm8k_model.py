"""A model of half a million parameters that learns the text of GSM8K's answers: real language on one core."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

LENGTH, VOCABULARY, HELD_OUT = 64, 1024, 400
IGNORED = -100


class Gsm8kModel:
    """Model, training batches and held-out rows; model and row order follow from the seed, the rows do not.

    ``rows`` is GSM8K's train.jsonl, of which the answers are learnt as text, cut after 64 tokens of a BPE of their own:
    7,000 rows, so that a thousand steps go through them once and nothing can be learnt by heart.
    """

    def __init__(self, seed: int, rows: Path, batch: int = 8) -> None:
        self._batch = batch
        self._order = random.Random(seed)
        texts = [json.loads(line)["answer"] for line in rows.read_text(encoding="utf-8").splitlines()]
        tokenizer = _tokenizer(texts)
        tokens = [tokenizer.encode(text).ids[:LENGTH] for text in texts]
        self._held_out, self._train = tokens[:HELD_OUT], tokens[HELD_OUT:]
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            tie_word_embeddings=True,
        )
        self.model: Any = Qwen3ForCausalLM(config)

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and labels, for ever."""
        while True:
            rows = self._order.sample(self._train, len(self._train))
            for start in range(0, len(rows) - self._batch + 1, self._batch):
                yield _padded(rows[start : start + self._batch])

    def loss(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean over the labelled tokens."""
        loss: torch.Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """On rows that training never shows."""
        return self.loss(*_padded(self._held_out)).item()


def _tokenizer(texts: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        texts[:2000], trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def _padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(len(rows), max(len(tokens) for tokens in rows), dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for index, tokens in enumerate(rows):
        ids[index, : len(tokens)] = labels[index, : len(tokens)] = torch.tensor(tokens)
    return ids, labels
