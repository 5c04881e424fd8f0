"""Toy tokenizers and files for the data tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lazytrain.jobs.data import Prepared, prepare
from lazytrain.jobs.spec import Data


@pytest.fixture
def make_tokenizer() -> Callable[..., Any]:
    """Byte-level tokenizer: one token a byte, apart from the merges and special tokens asked for."""

    def make(
        *,
        specials: tuple[str, ...] = ("<s>", "</s>"),
        merges: tuple[tuple[str, str], ...] = (),
        template: str | None = None,
        auto_bos: bool = False,
        **roles: str,
    ) -> Any:
        pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
        core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens([AddedToken(token, special=True) for token in specials])
        if auto_bos:
            core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **{"eos_token": "</s>", **roles})
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer()


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def load(tokenizer: Any) -> Callable[..., Prepared]:
    """Prepare files; everything is trained on unless a split or evaluation files are given."""

    def load(*paths: Path, tokenizer: Any = tokenizer, format: str = "auto", **options: Any) -> Prepared:
        options = {"split": {"train": 1.0}, **options}
        train = [{"path": str(path), "format": format} for path in paths]
        return prepare(Data.model_validate({"train": train, **options}), tokenizer)

    return load
