"""Facts are a pure function of model and shape: the many runs of one tiny model measure them once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedModel

from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.train import setup

_KNOWN: dict[Any, ModelFacts] = {}


def known_facts(model: PreTrainedModel, **shape: Any) -> ModelFacts:
    parameters = tuple((name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters())
    key = (model.config.to_json_string(), parameters, tuple(sorted(shape.items())))
    if key not in _KNOWN:
        _KNOWN[key] = model_facts(model, **shape)
    return _KNOWN[key]


@pytest.fixture(autouse=True, scope="session")
def facts_are_measured_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "model_facts", known_facts)
        yield
