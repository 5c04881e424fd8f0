"""Batched greedy generation writes what the plain model would write for each prompt alone."""

from __future__ import annotations

import string
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from lazytrain.jobs.errors import InputError
from lazytrain.jobs.generate import Sampling, generate
from lazytrain.jobs.generate.sampling import nucleus

POSITIONS = 48
PROMPTS = ["a", "how many are there in all", "one two", "x y z one two three"]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3,
}
IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pieces = ["<pad>", "</s>", *string.ascii_lowercase, " "]
    core = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=" "))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="<pad>")


@pytest.fixture(params=["llama", "qwen3", "gpt2"])
def model(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    size = len(tokenizer)
    config = {
        "llama": lambda: LlamaConfig(vocab_size=size, **SIZES, **IDS),
        "qwen3": lambda: Qwen3Config(vocab_size=size, head_dim=8, **SIZES, **IDS),
        "gpt2": lambda: GPT2Config(
            vocab_size=size, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, initializer_range=0.3, **IDS
        ),
    }[request.param]()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def alone(model: Any, tokenizer: Any, prompt: str, new_tokens: int) -> tuple[str, bool]:
    """Greedy continuation without cache, padding or transformers' generate; and whether it ended by itself."""
    ids, new = tokenizer(prompt).input_ids, []
    model.eval()
    for _ in range(new_tokens):
        with torch.no_grad():
            new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
        if new[-1] == tokenizer.eos_token_id:
            return tokenizer.decode(new[:-1], skip_special_tokens=True), True
    return tokenizer.decode(new, skip_special_tokens=True), False


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_equals_each_prompt_alone(model: Any, tokenizer: Any, batch: int) -> None:
    expected = [alone(model, tokenizer, prompt, 16)[0] for prompt in PROMPTS]
    assert generate(model, tokenizer, PROMPTS, max_new_tokens=16, batch=batch) == expected
    assert len(set(expected)) == len(PROMPTS)


def test_rows_end_at_the_end_token(model: Any, tokenizer: Any) -> None:
    """The token that the model likes to write first after one prompt is made the end token's twin."""
    first = tokenizer(alone(model, tokenizer, PROMPTS[1], 3)[0][2:]).input_ids[0]
    model.generation_config.eos_token_id = [1, first]
    got = generate(model, tokenizer, PROMPTS, max_new_tokens=16, batch=4)
    whole = [alone(model, tokenizer, prompt, 16)[0] for prompt in PROMPTS]
    stop = tokenizer.decode([first])
    assert got == [text.split(stop)[0] for text in whole]
    assert len(got[1]) <= 2


def test_settings_of_the_model_do_not_matter_and_come_back(model: Any, tokenizer: Any) -> None:
    expected = generate(model, tokenizer, PROMPTS, max_new_tokens=16, batch=4)
    model.train()
    settings = model.generation_config
    settings.update(do_sample=True, temperature=5.0, repetition_penalty=1.7, max_length=3, use_cache=False)
    assert generate(model, tokenizer, PROMPTS, max_new_tokens=16, batch=4) == expected
    assert model.generation_config is settings
    assert settings.repetition_penalty == 1.7
    assert model.training


def test_the_models_positions_limit_new_tokens(model: Any, tokenizer: Any) -> None:
    prompt = "x" * (POSITIONS - 3)
    (text,) = generate(model, tokenizer, [prompt], max_new_tokens=16, batch=1)
    assert text == alone(model, tokenizer, prompt, 3)[0]
    with pytest.raises(InputError, match=f"prompt 1 has {POSITIONS} tokens"):
        generate(model, tokenizer, ["a", "x" * POSITIONS], max_new_tokens=16, batch=1)


def test_nothing_to_do(model: Any, tokenizer: Any) -> None:
    assert generate(model, tokenizer, [], max_new_tokens=16, batch=4) == []
    with pytest.raises(InputError, match="prompt 0 has no tokens"):
        generate(model, tokenizer, [""], max_new_tokens=16, batch=4)


def test_rows_that_finished_make_room_for_others(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve rows, four at once: every pass over the model has four rows while there are that many left."""
    prompts = [f"{letter} {word}" for letter in "abcdef" for word in ("one", "how many")]
    expected = [alone(model, tokenizer, prompt, 20)[0] for prompt in prompts]
    rounds: list[int] = []
    original = model.generate

    def spy(**arguments: Any) -> Any:
        rounds.append(len(arguments["input_ids"]))
        return original(**arguments)

    monkeypatch.setattr(model, "generate", spy)
    assert generate(model, tokenizer, prompts, max_new_tokens=20, batch=4) == expected
    assert len(rounds) > 2 and set(rounds[:-2]) == {4}, rounds


def test_limits_near_the_end_of_the_positions(model: Any, tokenizer: Any) -> None:
    """A row with three positions left beside rows with many: it stops there, they go on."""
    prompts = ["x" * (POSITIONS - 3), "a", "one two"]
    expected = [alone(model, tokenizer, prompt, 3 if i == 0 else 16)[0] for i, prompt in enumerate(prompts)]
    assert generate(model, tokenizer, prompts, max_new_tokens=16, batch=3) == expected


def test_draws_depend_on_seed_and_row_and_not_on_the_batch(model: Any, tokenizer: Any) -> None:
    warm = Sampling(temperature=1.5, top_p=0.9, seed=3)
    drawn = [generate(model, tokenizer, PROMPTS, max_new_tokens=16, batch=b, sampling=warm) for b in (1, 2, 4)]
    assert drawn[0] == drawn[1] == drawn[2]
    greedy = generate(model, tokenizer, PROMPTS, max_new_tokens=16, batch=4)
    assert drawn[0] != greedy
    other = Sampling(temperature=1.5, top_p=0.9, seed=4)
    assert generate(model, tokenizer, PROMPTS, max_new_tokens=16, batch=4, sampling=other) != drawn[0]
    cold = Sampling(temperature=1e-5)
    assert generate(model, tokenizer, PROMPTS, max_new_tokens=16, batch=4, sampling=cold) == greedy


def test_draws_follow_the_distribution() -> None:
    """2,000 draws of the first token from known probabilities, each within four standard errors."""
    from lazytrain.jobs.generate.sampling import Draw

    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    rows = 2000
    draw = Draw(Sampling(seed=1), range(rows), [0] * rows, width=1)
    ids = draw(torch.zeros(rows, 1, dtype=torch.int64), probabilities.log().expand(rows, -1)).argmax(-1)
    shares = torch.bincount(ids, minlength=4) / rows
    assert ((shares - probabilities).abs() < 4 * (probabilities * (1 - probabilities) / rows).sqrt()).all()


def test_the_nucleus_is_the_smallest_set_with_that_probability() -> None:
    scores = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    for top_p, kept in ((0.4, [1]), (0.5, [1]), (0.6, [1, 3]), (0.76, [1, 2, 3]), (1.0, [0, 1, 2, 3])):
        assert nucleus(scores, top_p)[0].isfinite().nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": float("nan")}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Sampling(**wrong)
