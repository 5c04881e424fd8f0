"""Models of plain expressions are those that MathOpt makes of the same words."""

from __future__ import annotations

import random
from typing import Any

import pytest
from ortools.math_opt.python import mathopt

from lazytrain.schedulers.planner.linear import Model, fast_sum


def drawn(model: Any, add_up: Any, choose: random.Random) -> Any:
    """The model with variables of every kind, and constraints between sums, differences and multiples of them."""
    variables = [model.add_binary_variable(), model.add_integer_variable(lb=-2, ub=7)]
    variables += [model.add_variable(lb=0.0), model.add_variable(ub=choose.choice((1.0, 3.0)))]

    def term() -> Any:
        variable, factor = choose.choice(variables), choose.choice((-2.0, 0.5, 1.0, 3))
        return choose.choice((variable, variable * factor, factor * variable - 1.5, 1 - variable, -variable))

    for _ in range(12):
        left, right = add_up([term() for _ in range(3)]) + 0.25, choose.choice((term() + term(), 4, 0.0))
        kind = choose.randrange(3)
        model.add_linear_constraint(left >= right if kind == 0 else left <= right if kind == 1 else left == right)
    model.minimize(add_up([term(), term()]) + 2.0)
    return model


@pytest.mark.parametrize("seed", range(30))
def test_the_same_words_make_the_same_model(seed: int) -> None:
    ours = drawn(Model("both"), fast_sum, random.Random(seed)).to_mathopt()
    theirs = drawn(mathopt.Model(name="both"), mathopt.fast_sum, random.Random(seed))
    assert ours.export_model() == theirs.export_model()


def test_nothing_is_whole_while_a_model_is_in_parts() -> None:
    model = drawn(Model("parts"), fast_sum, random.Random(0))
    with model.in_parts():
        assert not any(variable.integer for variable in model.to_mathopt().variables())
    assert [variable.integer for variable in model.to_mathopt().variables()] == [True, True, False, False]


def test_expressions_are_not_keys_and_do_not_change() -> None:
    model = Model("plain")
    one, other = model.add_variable(), model.add_variable()
    total = one + other
    assert (total - other + one).terms == {0: 2.0, 1: 0.0} and total.terms == {0: 1.0, 1: 1.0}
    with pytest.raises(TypeError):
        hash(total)
