"""Arguments of a unit, taken apart and put together again."""

from __future__ import annotations

from collections import UserDict

import torch

from lazytrain.jobs.effects import WithEffects, apply, has_containers
from lazytrain.jobs.replay import Call


class Shared(UserDict):
    """A dictionary of a class of its own, as models use for keys and values that layers share."""


def test_tensors_in_a_dictionary_of_another_class_are_arguments():
    shared, x = Shared(keys=(torch.ones(2, requires_grad=True),)), torch.ones(2)
    call = Call.of(lambda x, shared: x * shared["keys"][0], (x, shared), {})
    assert [tensor is x or tensor is shared["keys"][0] for tensor in call.tensors()] == [True, True]
    assert call.needs_gradient == [True, True] and has_containers(call)
    gradients, _ = call.backward(None, [torch.ones(2)], [])
    assert all(torch.equal(gradient, torch.ones(2)) for gradient in gradients)


def test_what_a_unit_puts_into_one_reaches_the_caller_and_not_twice():
    shared, x = Shared(), torch.ones(2)

    def run(x, shared):
        assert not shared
        shared["keys"] = 2 * x
        return x

    call = Call.of(WithEffects(run), (x, shared), {})
    outcomes = [call.forward(), call.forward()]
    assert not shared
    assert apply(outcomes[0], (x, shared), {}) is x
    assert torch.equal(shared["keys"], 2 * x)
