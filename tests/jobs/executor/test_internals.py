"""What is kept of a layer: gradients from it are the same bits, and to keep it takes few operations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazytrain.jobs.executor.internals import Graph, Products, whole
from lazytrain.jobs.memory import StorageTracker, unseen
from lazytrain.jobs.replay import Call


class Counted(TorchDispatchMode):
    """Counts what a dispatch mode is shown: each takes the host as long as a small operation."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def layer() -> torch.nn.Sequential:
    torch.manual_seed(0)
    parts = [part for _ in range(6) for part in (torch.nn.Linear(16, 16, bias=False), torch.nn.Tanh())]
    return torch.nn.Sequential(*parts)


def slot_of(layer: torch.nn.Sequential) -> torch.Tensor:
    """The layer's weights in one flat tensor, as in a slot."""
    flat = torch.cat([parameter.data.reshape(-1) for parameter in layer.parameters()])
    for parameter, part in zip(layer.parameters(), flat.split(16 * 16), strict=True):
        parameter.data = part.view(16, 16)
    return flat


def to_the_host_and_back(kept: Graph | Products) -> None:
    """As `ActivationStore` does it; what was on the device is overwritten."""
    for storage in kept.storages:
        assert storage.memory is not None
        there = whole(storage.memory)
        storage.memory = there.clone().untyped_storage()
        there.fill_(255)


@pytest.mark.parametrize("kind", [Graph, Products])
@pytest.mark.parametrize("swapped", [False, True])
def test_gradients_are_those_of_a_plain_backward(
    layer: torch.nn.Sequential, kind: type[Graph] | type[Products], swapped: bool
) -> None:
    parameters, states, given = list(layer.parameters()), torch.randn(8, 16), [torch.randn(8, 16)]
    slot = slot_of(layer)
    expected = Call.of(layer, (states,), {}).backward(states, given, parameters)
    call, kept = Call.of(layer, (states,), {}), kind(swapped=swapped)
    output = kept.forward(call, states, slot)
    assert torch.equal(output, layer(states))
    if swapped:
        assert kept.storages
        to_the_host_and_back(kept)
    found = kept.backward(call, states, slot, given, parameters)
    pairs = zip(itertools.chain(*found), itertools.chain(*expected), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def operations(kept: Graph | None, layer: torch.nn.Sequential) -> tuple[int, int]:
    """Those of a forward with a graph and of its backward."""
    states, given, slot = torch.randn(8, 16), [torch.ones(8, 16)], slot_of(layer)
    call, counted, parameters = Call.of(layer, (states,), {}), Counted(), list(layer.parameters())
    with counted:
        if kept is None:
            graphed = call.forward_with_graph(states)
        else:
            kept.forward(call, states, slot)
        forward = counted.operations
        if kept is None:
            call.differentiate(graphed, given, parameters)
        else:
            kept.backward(call, states, slot, given, parameters)
    return forward, counted.operations - forward


def test_to_keep_a_graph_takes_an_operation_a_tensor_at_most(layer: torch.nn.Sequential) -> None:
    plain, kept, swapped = (operations(kept, layer) for kept in (None, Graph(), Graph(swapped=True)))
    saved = 12  # the result of each tanh twice; inputs of products are these or the boundary, weights are in the slot
    ends = 6  # what stands for the boundary and the output in the graph
    assert kept[0] <= plain[0] + saved + ends
    assert swapped[0] <= plain[0] + ends
    assert kept[1] == swapped[1] <= plain[1] + 12  # autograd's own, for each tensor that a product is given back


def test_what_no_mode_sees_is_not_counted_and_all_else_is() -> None:
    tracker, flat = StorageTracker(), torch.zeros(64)
    with tracker:
        with unseen():
            view = flat[8:16].view(2, 4)
        assert tracker.live_bytes == 0
        copy = view.clone()
        assert tracker.live_bytes == copy.nbytes == 32
