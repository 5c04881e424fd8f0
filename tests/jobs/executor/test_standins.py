"""What the stand-ins refuse."""

from __future__ import annotations

import pytest
import torch

from lazytrain.jobs.errors import ProgramError
from lazytrain.jobs.executor import stream
from lazytrain.jobs.executor.standins import autograd_function_around
from lazytrain.jobs.policy import Policy


class Reversible(torch.autograd.Function):
    """As Reformer does: layers run in its forward, and parts of them again in its own backward."""

    @staticmethod
    def forward(ctx, states, layer, arguments):
        return layer.run(states, **arguments)

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("it was refused before")


def test_a_layer_inside_an_autograd_function_of_the_models_own_is_refused_by_name(make_model, facts_of, make_batch):
    model, facts = make_model("llama"), facts_of("llama")
    with stream(model, Policy.from_homes(facts, ["gpu"] * 6), device="cpu", facts=facts) as streamed:
        layer = model.model.layers[2]
        layer.run, layer.forward = layer.forward, lambda states, **kwargs: Reversible.apply(states, layer, kwargs)
        with pytest.raises(ProgramError, match=r"layers\.2 inside an autograd function of its own, Reversible"):
            streamed.model(**make_batch(0))
        layer.forward = layer.run
    assert autograd_function_around() == ""
