"""Units that are alike: one of them runs for all, unless it could read what belongs to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from lazytrain.jobs import effects, introspect
from lazytrain.jobs.alike import Alike
from lazytrain.jobs.effects import Places, unit_call
from lazytrain.jobs.introspect import model_facts


def llama(layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100,
    )  # fmt: skip


def test_facts_are_the_same_when_every_layer_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = model_facts(llama(5), micro_batch=2, sequence_length=16)
    monkeypatch.setattr(introspect, "_elements_of_lists", lambda model: {})
    assert model_facts(llama(5), micro_batch=2, sequence_length=16) == quick


def test_a_longer_model_runs_no_more_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, forward = [0], LlamaMLP.forward

    def counted(self: LlamaMLP, states: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        return forward(self, states)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    numbers = []
    for layers in (3, 9):
        runs[0] = 0
        model_facts(llama(layers), micro_batch=2, sequence_length=16)
        numbers.append(runs[0])
    assert numbers[0] == numbers[1] > 0


class Layer(nn.Module):
    def __init__(self, *others: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(3, 3)
        self.others = list(others)
        self.runs = 0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.own(states) * 2


def key(name: str, layer: nn.Module) -> Any:
    return Alike().key(name, layer, unit_call(Places(layer, {}), layer.forward, {}, (torch.ones(2, 3),), {}))


def test_a_layer_that_holds_another_secretly_is_like_none() -> None:
    assert key("a", Layer()) == key("b", Layer())
    hidden = nn.Linear(3, 3)
    assert key("a", Layer(hidden)) != key("b", Layer(hidden))


def test_a_layer_of_which_hooks_collect_something_is_like_none_of_which_they_do_not() -> None:
    plain = key("a", Layer())
    token = effects._collector.set({"router_logits": []})
    try:
        assert key("a", Layer()) != plain
    finally:
        effects._collector.reset(token)


def test_what_stands_in_returns_the_same_shapes() -> None:
    layers, units = {"a": Layer(), "b": Layer()}, Alike()
    for _ in range(2):  # the second time nothing runs
        with units.once_each(layers, {}):
            outputs = [layer(torch.ones(2, 3)) for layer in layers.values()]
        assert [layer.runs for layer in layers.values()] == [1, 0]
        assert outputs[1].shape == outputs[0].shape
    layers["b"](torch.ones(2, 3))
    assert layers["b"].runs == 1  # afterwards all of them run again
