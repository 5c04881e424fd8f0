"""Of whole layers that fit a room none is cut off, and halves of them that fill it are."""

from __future__ import annotations

import itertools
import random

import pytest

from lazytrain.schedulers.planner.linear import Model, fast_sum
from lazytrain.schedulers.planner.rounding import Item, add_whole_layers
from lazytrain.schedulers.planner.solver import run_solver


def most(room: float, sizes: list[list[float]], *, whole: bool, weights: list[list[float]]) -> float:
    """The most weight of choices, one per layer, that the cuts and the room allow."""
    model = Model("most")
    items = [
        Item(size, layer, model.add_binary_variable() if whole else model.add_variable(lb=0.0, ub=1.0))
        for layer, kinds in enumerate(sizes)
        for size in kinds
    ]
    for layer in range(len(sizes)):
        model.add_linear_constraint(fast_sum(item.chosen for item in items if item.layer == layer) <= 1)
    model.add_linear_constraint(fast_sum(item.size * item.chosen for item in items) <= room)
    add_whole_layers(model, room, items, len(sizes))
    flat = itertools.chain.from_iterable(weights)
    model.minimize(fast_sum(-weight * item.chosen for weight, item in zip(flat, items, strict=True)))
    return -run_solver(model, "highs", 60.0, 0.0).objective


@pytest.mark.parametrize("seed", range(40))
def test_nothing_that_fits_is_cut_off(seed: int) -> None:
    choose = random.Random(seed)
    layers, room = choose.randint(2, 4), choose.uniform(5, 20)
    sizes = [[choose.uniform(-4, 12) for _ in range(choose.randint(1, 3))] for _ in range(layers)]
    weights = [[choose.uniform(0, 5) for _ in kinds] for kinds in sizes]
    fitting = (
        sum(weights[layer][kind] for layer, kind in enumerate(pick) if kind is not None)
        for pick in itertools.product(*([None, *range(len(kinds))] for kinds in sizes))
        if sum(sizes[layer][kind] for layer, kind in enumerate(pick) if kind is not None) <= room
    )
    assert most(room, sizes, whole=True, weights=weights) == pytest.approx(max(fitting), abs=1e-6)


def test_parts_of_layers_do_not_fill_what_whole_ones_leave() -> None:
    """Three layers of 6 in a room of 10: one of them, not one and two thirds; and two of 4.5, not two and a bit."""
    assert most(10.0, [[6.0]] * 3, whole=False, weights=[[1.0]] * 3) == pytest.approx(1.0)
    assert most(10.0, [[4.5]] * 3, whole=False, weights=[[1.0]] * 3) == pytest.approx(2.0)


def test_a_layer_that_is_larger_than_the_room_is_not_in_it_in_part() -> None:
    assert most(10.0, [[10.1]] * 2, whole=False, weights=[[1.0]] * 2) == 0
    assert most(10.0, [[10.1], [-1.0]], whole=False, weights=[[1.0], [0.0]]) == pytest.approx(1.0)


def test_a_layer_that_needs_another_to_give_room_is_not_there_without_it() -> None:
    """One of 10.5 in a room of 10 needs all of the other's choice that gives 1 back, be it dear or cheap."""
    assert most(10.0, [[10.5], [-1.0]], whole=False, weights=[[1.0], [-2.0]]) == pytest.approx(0.0)
    assert most(10.0, [[10.5], [-1.0]], whole=False, weights=[[1.0], [-0.1]]) == pytest.approx(0.9)
