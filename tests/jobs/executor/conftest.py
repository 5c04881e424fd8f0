"""Tiny models of four families, policies drawn at random, and a GPUDirect Storage that is not there."""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lazytrain.jobs.executor.devices import EmulatedDevice
from lazytrain.jobs.executor.stores import gpudirect as direct
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import LayerPolicy, Policy

ROWS, LENGTH, VOCABULARY, LAYERS = 3, 17, 50, 5
_COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_LLAMA_LIKE = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
}  # fmt: skip
CONFIGS = {
    "qwen2": {"model_type": "qwen2", **_LLAMA_LIKE},
    "qwen3": {"model_type": "qwen3", **_LLAMA_LIKE, "head_dim": 8, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", **_LLAMA_LIKE, "attention_dropout": 0.1},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 64},
}


@pytest.fixture(params=sorted(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    def make(family: str, *, seed: int = 0, dropout: bool = True, **changes: object) -> PreTrainedModel:
        config = {**CONFIGS[family], **_COMMON, **changes}
        if not dropout and "attention_dropout" in config:
            config["attention_dropout"] = 0.0
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config), dtype=torch.float32
        )
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout) and not dropout:
                module.p = 0.0
        return model.train()

    return make


@pytest.fixture(scope="session")
def facts_of() -> Callable[..., ModelFacts]:
    known: dict[tuple[str, int], ModelFacts] = {}

    def facts(family: str, rows: int = ROWS) -> ModelFacts:
        if (family, rows) not in known:
            config = {**CONFIGS[family], **_COMMON}
            known[family, rows] = model_facts(config, micro_batch=rows, sequence_length=LENGTH, dtype="float32")
        return known[family, rows]

    return facts


@pytest.fixture(scope="session")
def random_policy() -> Callable[[ModelFacts, int], Policy]:
    def draw(facts: ModelFacts, seed: int, **options: int) -> Policy:
        choose = random.Random(seed)
        inner = [choose.choice(("gpu", "host", "nvme", "recompute")) for _ in facts.layers[1:]]
        homes = [choose.choice(("gpu", "host", "nvme")), *inner, "gpu"]
        policy = Policy.from_homes(facts, homes, weight_slots=choose.choice((2, 3)), **options)
        layers = [
            LayerPolicy(
                index=i,
                internals="none" if homes[i + 1] == "recompute" else choose.choice(("none", "matmuls", "all")),
                internals_home=choose.choice(("gpu", "host")),
                resident=choose.random() < 0.3,
            )
            for i in range(len(facts.layers))
        ]
        policy = policy.model_copy(update={"staging_slots": choose.choice((1, 2, 3)), "layers": tuple(layers)})
        parked = [{layer for layer in range(len(layers)) if choose.random() < 0.4} for _ in range(2)]
        return policy.parked(optimizer=parked[0], gradients=parked[1]) if choose.random() < 0.5 else policy

    return draw


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., dict[str, torch.Tensor]]:
    def make(seed: int = 0, rows: int = ROWS, length: int = LENGTH) -> dict[str, torch.Tensor]:
        """Rows of different lengths, padded on the right, with a loss on their last part only."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
        mask, labels = torch.ones_like(ids), ids.clone()
        labels[:, : length // 3] = -100
        for row in range(1, rows):
            ids[row, length - 2 * row :], mask[row, length - 2 * row :], labels[row, length - 2 * row :] = 2, 0, -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return make


@pytest.fixture
def gpudirect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An emulated GPU from which files can be reached; gives the driver behind it (`fake_kvikio.Driver`)."""
    driver = runpy.run_path(str(Path(__file__).with_name("fake_kvikio.py")))["Driver"]()
    for name, module in driver.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(EmulatedDevice, "has_direct_io", True)
    monkeypatch.setattr(direct, "_tried", {})
    yield driver
    driver.close()
    assert driver.open_files == 0
