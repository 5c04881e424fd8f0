"""Rows far longer than what is kept of them: the same tokens, without tokenizing what is cut off."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lazytrain.jobs.data import tokens
from lazytrain.jobs.data.template_spans import Rendered
from lazytrain.jobs.data.tokens import Limit, encode, tokenized

MERGES = (("a", "b"), ("ab", "c"), ("c", "a"), ("b", "a"))


def rendered(text: str, *spans: tuple[int, int]) -> Rendered:
    return Rendered(text=text, spans=spans, prompt="", answer="", context_turns=0)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_tokens_as_of_the_whole_row(make_tokenizer, seed: int) -> None:
    tokenizer, drawn = make_tokenizer(merges=MERGES), random.Random(seed)
    text = "".join(drawn.choices("abc ", k=50_000))
    row = rendered(text, (100, 30_000), (40_000, 50_000))
    limit = Limit.of(tokenizer, 512)
    assert limit.characters < len(text) / 5
    (short,) = encode(tokenizer, [row], tokenized(tokenizer, [row], limit), limit)
    whole = Limit(512, len(text))
    (long,) = encode(tokenizer, [row], tokenized(tokenizer, [row], whole), whole)
    assert short == long and short.truncated and len(short.ids) == 512 == short.spans[0][1]


def test_no_more_than_what_can_matter_is_tokenized(make_tokenizer, monkeypatch) -> None:
    tokenizer = make_tokenizer(merges=MERGES)
    limit, seen = Limit.of(tokenizer, 32), []

    class Backend:
        no_padding = no_truncation = staticmethod(lambda: None)

        def encode_batch(self, texts: list[str], **options: object) -> list[object]:
            seen.extend(map(len, texts))
            return tokenizer.backend_tokenizer.encode_batch(texts, **options)

    class Seen:
        backend_tokenizer = Backend()

    (row,) = tokenized(Seen(), [rendered("abc" * 1_000_000)], limit)
    assert seen == [limit.characters] and limit.characters < 10_000 and len(row.ids) > 32


@pytest.mark.parametrize("text", ["a" + " " * 5000 + "b", "x" * 5000 + " a b"])
def test_long_blanks_and_unknown_words_hide_nothing(text: str) -> None:
    """Thousands of characters that become no token, or one."""
    core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    limit = Limit.of(tokenizer, 8)
    assert limit.characters < 5000
    (encoding,) = tokenized(tokenizer, [rendered(text)], limit)
    assert encoding.ids[-1] == 2


def test_the_margin_is_part_of_the_limit(make_tokenizer) -> None:
    assert Limit.of(make_tokenizer(), 8).characters > tokens._MARGIN
