"""Rows that share a sequence give the loss and the gradients that they give alone."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lazytrain.jobs.data import IGNORED, Rows, batches, collate, order, packing_problem
from lazytrain.jobs.data.packing import first_fit

SHAPE = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "mistral-sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
}


def model_of(family: str, attention: str):
    torch.manual_seed(0)
    model, config, own = FAMILIES[family]
    return model(config(**SHAPE, **own, attn_implementation=attention))


@pytest.fixture
def rows() -> Rows:
    rows = Rows()
    for row, length in enumerate((9, 4, 13, 2, 7, 7)):
        ids = [(3 * row + 5 * at) % 39 + 1 for at in range(length)]
        rows.append(ids, [(1, 2), (length // 2 + 1, length)] if length > 4 else 1, "", "")
    return rows


def loss_and_gradients(model, batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch.inputs(), use_cache=False, num_items_in_batch=batch.supervised).loss
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_unpacked(rows: Rows, family: str, attention: str) -> None:
    model = model_of(family, attention)
    assert packing_problem(model) is None
    apart, together = collate(rows, range(6), 0), collate(rows, range(6), 0, pack_length=20)
    assert together.input_ids.shape[0] == 3 < apart.input_ids.shape[0]
    assert (together.tokens, together.supervised) == (apart.tokens, apart.supervised)
    one, other = loss_and_gradients(model, apart), loss_and_gradients(model, together)
    assert one[0].item() == pytest.approx(other[0].item(), rel=1e-6)
    largest = max(gradient.abs().max() for gradient in one[1])
    assert max((a - b).abs().max() for a, b in zip(one[1], other[1], strict=True)) <= 1e-6 * largest


def test_a_packed_batch(rows: Rows) -> None:
    batch = collate(rows, [1, 2, 3], pad_id=39, pack_length=16)
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[*range(13), 0, 1], [*range(4), *range(11)]]
    assert batch.attention_mask.sum(1).tolist() == [15, 4]
    assert batch.input_ids[0].tolist() == rows.input_ids[2] + rows.input_ids[3]
    assert batch.labels[0, 13] == IGNORED and batch.labels[1, 4:].unique().tolist() == [IGNORED]
    assert batch.tokens == 19
    assert batch.inputs().keys() == {"input_ids", "position_ids", "labels"}


class Running(nn.Module):
    """A layer whose state runs along the sequence, whatever the positions say."""

    def forward(self, states: torch.Tensor, **_: object) -> torch.Tensor:
        return states + states.cumsum(1) / 10


class TestModelsThatMixRows:
    def test_a_layer_with_a_running_state(self) -> None:
        model = model_of("llama", "sdpa")
        model.model.layers[2] = Running()
        problem = packing_problem(model)
        assert problem is not None and "see each other" in problem
        assert len(model.model.layers) == model.config.num_hidden_layers == 3

    def test_an_attention_that_ignores_positions(self, monkeypatch) -> None:
        monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda *_: None)
        assert "see each other" in str(packing_problem(model_of("llama", "sdpa")))

    def test_an_attention_that_cannot_be_checked(self) -> None:
        model = model_of("llama", "sdpa")
        model.config._attn_implementation = "flash_attention_2"
        assert "cannot be checked" in str(packing_problem(model))

    def test_a_model_of_another_build(self) -> None:
        model = model_of("llama", "sdpa")
        del model.model.layers
        assert "check of the model failed" in str(packing_problem(model))

    def test_the_check_leaves_the_model_as_it_was(self) -> None:
        model = model_of("qwen3", "sdpa").bfloat16().train()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert packing_problem(model) is None
        assert model.training and all(torch.equal(before[name], t) for name, t in model.state_dict().items())


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 40))
def test_first_fit(lengths: list[int], room: int) -> None:
    sequences = first_fit(lengths, room)
    assert sorted(row for sequence in sequences for row in sequence) == list(range(len(lengths)))
    for sequence in sequences:
        assert len(sequence) == 1 or sum(lengths[row] for row in sequence) <= room
    fills = [sum(lengths[row] for row in sequence) for sequence in sequences]
    assert all(fills[at] + min(lengths[row] for row in sequences[at + 1]) > room for at in range(len(fills) - 1))


class TestOrder:
    @pytest.fixture
    def many(self) -> Rows:
        rows = Rows()
        for row in range(203):
            rows.append(list(range(row % 37 + 2)), 1, "", "")
        return rows

    def test_packing_changes_neither_rows_nor_order(self, many: Rows) -> None:
        options = {"batch": 8, "seed": 1, "epoch": 2, "pad_id": 0}
        for apart, together in zip(batches(many, **options), batches(many, **options, pack_length=40), strict=True):
            assert (apart.tokens, apart.supervised) == (together.tokens, together.supervised)
            assert together.input_ids.numel() <= apart.input_ids.numel()

    def test_buckets(self, many: Rows) -> None:
        plain = order(many, batch=8, seed=1, epoch=0)
        buckets = order(many, batch=8, seed=1, epoch=0, buckets=True)
        assert sorted(chain(*buckets)) == sorted(chain(*plain)) == list(range(203))
        assert [len(batch) for batch in buckets] == [8] * 25 + [3]
        lengths = many.lengths

        def padding(batches: list[list[int]]) -> int:
            return sum(int(lengths[batch].max()) * len(batch) - int(lengths[batch].sum()) for batch in batches)

        assert padding(buckets) < 0.25 * padding(plain)
        assert buckets != order(many, batch=8, seed=1, epoch=1, buckets=True)
        assert buckets == order(many, batch=8, seed=1, epoch=0, buckets=True)

    def test_depends_on_the_content(self, many: Rows) -> None:
        other = many.take(range(203))
        other.fingerprint = "0"
        assert order(other, batch=8, seed=1, epoch=0) != order(many, batch=8, seed=1, epoch=0)
