"""Facts measured on fake tensors, against closed forms and against what really runs."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lazytrain.jobs.errors import ModelError
from lazytrain.jobs.introspect import model_facts

ROWS, LENGTH = 2, 16
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 128,
}  # fmt: skip
JETMOE = {
    "model_type": "jetmoe", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
    "num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 32, "vocab_size": 128,
             "bos_token_id": 0, "eos_token_id": 0},
}  # fmt: skip

OPT = {
    "model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 128,
}  # fmt: skip


def facts_of(name, **changes):
    return model_facts({**FAMILIES[name], **changes}, micro_batch=ROWS, sequence_length=LENGTH, dtype="float32")


def build(name):
    config = dict(FAMILIES[name])
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_parameter_belongs_to_one_unit(name):
    model, facts = build(name), facts_of(name)
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert facts.parameters == sum(u.parameters for u in facts.units if not u.shares_weights_with)
    for unit in facts.units:
        assert unit.parameters == sum(p.numel() for p in model.get_submodule(unit.name).parameters())


def test_the_chain_of_a_llama():
    facts = facts_of("llama")
    assert [u.name for u in facts.before] == ["model.embed_tokens"]
    assert [u.name for u in facts.layers] == [f"model.layers.{i}" for i in range(3)]
    assert [u.name for u in facts.after] == ["model.norm"]
    assert facts.head.name == "lm_head"
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.boundary_bytes == (ROWS * LENGTH * 64 * 4,) * 4
    assert (facts.hidden_size, facts.vocabulary, facts.tokens) == (64, 128, 32)


def test_positions_of_gpt2_come_before_the_layers_and_its_tied_head_is_known():
    facts = facts_of("gpt2")
    assert [u.name for u in facts.before] == ["transformer.wte", "transformer.wpe"]
    assert facts.head.shares_weights_with == "transformer.wte"


def test_flops_of_a_llama_layer_are_those_of_its_products():
    tokens = ROWS * LENGTH
    products = 2 * tokens * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96)
    attention = 2 * (2 * ROWS * 4 * LENGTH * LENGTH * 16)
    layer = facts_of("llama").layers[0]
    assert (layer.forward_flops, layer.attention_flops) == (products + attention, attention)


def test_bytes_follow_the_dtype():
    wide, narrow = facts_of("llama"), model_facts(LLAMA, micro_batch=ROWS, sequence_length=LENGTH, dtype="bfloat16")
    assert wide.layers[0].weight_bytes == 2 * narrow.layers[0].weight_bytes
    assert wide.boundary_bytes[0] == 2 * narrow.boundary_bytes[0]


def test_saved_bytes_are_those_of_a_real_run():
    model = build("qwen2").train()
    layer = model.model.layers[1]
    seen = {}

    def measure(module, args, kwargs):
        own = {p.untyped_storage().data_ptr() for p in module.parameters()}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = (storage, storage.nbytes())
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            module.forward(*args, **kwargs)

    handle = layer.register_forward_pre_hook(measure, with_kwargs=True)
    ids = torch.ones((ROWS, LENGTH), dtype=torch.int64)
    with torch.no_grad():  # an all-ones mask of real tensors is dropped; a padded one is kept, as fake tensors keep it
        mask = torch.ones_like(ids)
        mask[0, -1] = 0
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    handle.remove()
    assert sum(size for _, size in seen.values()) == pytest.approx(facts_of("qwen2").layers[1].saved_bytes, rel=0.02)


def test_equal_questions_get_equal_digests_and_other_batches_others():
    digest = facts_of("llama").digest
    assert digest == facts_of("llama").digest
    assert digest == model_facts(build("llama"), micro_batch=ROWS, sequence_length=LENGTH, dtype="float32").digest
    assert digest != facts_of("llama", num_hidden_layers=4).digest
    assert digest != model_facts(LLAMA, micro_batch=ROWS + 1, sequence_length=LENGTH, dtype="float32").digest


def test_a_large_model_needs_no_memory():
    before = torch.get_default_dtype()
    config = {
        "model_type": "qwen2", "hidden_size": 8192, "intermediate_size": 29568, "num_attention_heads": 64,
        "num_key_value_heads": 8, "num_hidden_layers": 4, "vocab_size": 152064,
    }  # fmt: skip
    facts = model_facts(config, micro_batch=8, sequence_length=4096)
    assert facts.parameters > 5e9
    assert facts.boundary_bytes[0] == 8 * 4096 * 8192 * 2
    assert torch.get_default_dtype() == before


def test_rows_longer_than_the_model_is_for_are_noted_where_it_runs_at_them():
    short, enough = (facts_of("llama", max_position_embeddings=positions) for positions in (LENGTH - 1, LENGTH))
    assert (short.positions, enough.notes) == (LENGTH - 1, ())
    assert "16 tokens are longer than the 15" in short.notes[0]
    assert short.digest == enough.digest  # a policy serves both


@pytest.mark.parametrize(
    "config, why",
    [
        ({"hidden_size": 8}, "model_type"),
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({**LLAMA, "num_hidden_layers": 10**6}, "num_hidden_layers is 1,000,000"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({**LLAMA, "vocab_size": -5}, "vocab_size is -5"),
        ({**LLAMA, "hidden_size": 10**400}, "hidden_size is 10,000,000"),
        ({**LLAMA, "quantization_config": "gptq"}, "quantised .gptq."),
        ({**LLAMA, "attn_implementation": "flash_attention_9"}, "flash_attention_9"),
        ({**LLAMA, "hidden_act": "swoosh"}, "swoosh"),
        ({"model_type": "t5"}, "T5"),
        (JETMOE, "by the values of a tensor .aten._local_scalar_dense"),
        ({**FAMILIES["gpt2"], "n_positions": 8}, "8 positions, the rows have 16"),
        ({**OPT, "max_position_embeddings": LENGTH - 1}, "15 positions, the rows have 16"),  # its table has 2 rows more
    ],
)
def test_a_model_that_cannot_be_streamed_is_refused_with_the_reason(config, why):
    with pytest.raises(ModelError, match=why):
        model_facts(config, micro_batch=ROWS, sequence_length=LENGTH, dtype="float32")


def test_a_model_type_that_nobody_knows_is_answered_with_the_nearest():
    with pytest.raises(ModelError, match="knows no model_type 'lama'") as caught:
        model_facts({**LLAMA, "model_type": "lama"}, micro_batch=ROWS, sequence_length=LENGTH)
    assert "llama" in caught.value.hint


@pytest.mark.parametrize(
    "write", [lambda p: p.data.clamp_(max=1), lambda p: p.detach().mul_(0.5), lambda p: torch.neg(p[0], out=p.data[1])]
)
def test_a_forward_that_writes_into_its_weights_is_refused(write):
    model = build("llama")

    class Limited(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm, self.gain = norm, torch.nn.Parameter(torch.ones(2))

        def forward(self, states):
            with torch.no_grad():
                write(self.gain)
            return self.norm(states) * self.gain[0]

    layer = model.model.layers[1]
    layer.input_layernorm = Limited(layer.input_layernorm)
    with pytest.raises(ModelError, match=r"writes into the parameter model\.layers\.1\.input_layernorm\.gain"):
        model_facts(model, micro_batch=ROWS, sequence_length=LENGTH, dtype="float32")


def test_flops_of_experts_are_counted():
    """Each token goes through 2 of 4 experts: gate, up and down products, beside attention and the router."""
    config = {
        "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
        "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    tokens, length = 2 * 16, 16
    layer = model_facts(config, micro_batch=2, sequence_length=length).layers[0]
    attention_products = 2 * tokens * 64 * (64 + 32 + 32 + 64)
    scores = 2 * 2 * 2 * 4 * length * length * 16
    experts = 2 * tokens * 2 * 3 * 64 * 96
    router = 2 * tokens * 64 * 4
    assert layer.forward_flops == attention_products + scores + experts + router


def test_a_model_that_reads_numbers_while_it_is_made_is_measured():
    """The vision tower of Gemma 3 does, which text does not reach."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = {
        "model_type": "gemma3",
        "text_config": {**sizes, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128},
        "vision_config": {**sizes, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    }
    facts = model_facts(config, micro_batch=ROWS, sequence_length=LENGTH)
    assert [u.name for u in facts.layers] == [f"model.language_model.layers.{i}" for i in range(2)]
