"""The demo's model and rows, for benchmarks that need real gradients: a million parameters that learn to add."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from lazytrain.platform.demo.inputs import write_inputs
from lazytrain.platform.demo.problems import make_problems

ROWS = 16_000
IGNORED = -100


class SmallModel:
    """Model, training batches and held-out rows; model and row order follow from the seed, the rows do not."""

    def __init__(self, seed: int, batch: int = 16) -> None:
        self._batch = batch
        self._order = random.Random(seed)
        with tempfile.TemporaryDirectory() as folder:
            model = write_inputs(folder, 0).parent / "model"
            tokenizer = AutoTokenizer.from_pretrained(model)
            config = Qwen3Config.from_pretrained(model)
        torch.manual_seed(seed)
        self.model: Any = Qwen3ForCausalLM(config)
        problems = make_problems(train=ROWS, eval=200, seed=0)
        self._train = [self._tokens(tokenizer, row) for row in problems.train]
        self._held_out = [self._tokens(tokenizer, row) for row in problems.eval]

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and labels, for ever."""
        while True:
            rows = self._order.sample(self._train, len(self._train))
            for start in range(0, len(rows) - self._batch + 1, self._batch):
                yield self._padded(rows[start : start + self._batch])

    def loss(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean over the labelled tokens."""
        loss: torch.Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """On rows with number pairs that training never shows."""
        return self.loss(*self._padded(self._held_out)).item()

    @staticmethod
    def _tokens(tokenizer: Any, row: dict[str, str]) -> tuple[list[int], int]:
        """Ids of the row, and how many of them are the question's."""
        query = tokenizer(f"{row['query']}\n").input_ids
        return [*query, *tokenizer(row["response"]).input_ids, tokenizer.eos_token_id], len(query)

    @staticmethod
    def _padded(rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
        length = max(len(tokens) for tokens, _ in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED)
        for index, (tokens, start) in enumerate(rows):
            ids[index, : len(tokens)] = torch.tensor(tokens)
            labels[index, start : len(tokens)] = torch.tensor(tokens[start:])
        return ids, labels


def folder() -> Path:
    """Where results are committed."""
    return Path(__file__).with_name("results")
