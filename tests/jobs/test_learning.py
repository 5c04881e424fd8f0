"""What a pattern freezes, and patterns that mean nothing or everything."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from lazytrain.jobs.errors import ModelError
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.learning import freeze


def model(tied: bool = True) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        made = Qwen3ForCausalLM(config)
    made.tie_weights()
    return made


def frozen(made: Qwen3ForCausalLM) -> set[str]:
    return {name for name, parameter in made.named_parameters() if not parameter.requires_grad}


@pytest.mark.parametrize(
    ("pattern", "means"),
    [
        ("model.norm.weight", lambda name: name == "model.norm.weight"),
        ("model.norm", lambda name: name == "model.norm.weight"),
        ("model.layers.1", lambda name: name.startswith("model.layers.1.")),
        ("model.layers.[01]", lambda name: name.startswith(("model.layers.0.", "model.layers.1."))),
        ("*mlp*", lambda name: ".mlp." in name),
        ("*.q_proj", lambda name: ".q_proj." in name),
        ("lm_head", lambda name: name == "model.embed_tokens.weight"),
    ],
)
def test_a_pattern_means_parameters_and_all_below_a_module(pattern, means):
    made = model()
    freeze(made, [pattern])
    assert frozen(made) == {name for name, _ in made.named_parameters() if means(name)} != set()


def test_without_a_pattern_everything_learns():
    made = model()
    freeze(made, [])
    assert frozen(made) == set()


def test_a_pattern_that_means_nothing_is_named_with_the_nearest():
    with pytest.raises(ModelError, match=r"no parameter or module 'model\.layer\.1'") as raised:
        freeze(model(), ["model.norm", "model.layer.1"])
    assert "model.layers.1" in raised.value.hint


def test_patterns_that_mean_everything_are_refused():
    with pytest.raises(ModelError, match="leaves no parameter of Qwen3ForCausalLM to learn"):
        freeze(model(), ["model.*"])  # the head is the embedding
    freeze(untied := model(tied=False), ["model"])
    assert set(dict(untied.named_parameters())) - frozen(untied) == {"lm_head.weight"}


def test_the_facts_that_are_planned_with_know_it():
    made, half = model(tied=False), model(tied=False)
    freeze(half, ["model.embed_tokens", "model.layers.0", "model.layers.1.mlp"])
    whole, some = (model_facts(m, micro_batch=2, sequence_length=8, dtype="bfloat16") for m in (made, half))
    assert some.parameters == whole.parameters
    assert some.trainable_parameters == sum(p.numel() for p in half.parameters() if p.requires_grad)
    assert [unit.gradient_bytes for unit in some.units[:2]] == [0, 0]
    assert 0 < some.layers[1].gradient_bytes < whole.layers[1].gradient_bytes
    assert [unit.weight_bytes for unit in some.units] == [unit.weight_bytes for unit in whole.units]
    assert some.digest != whole.digest
