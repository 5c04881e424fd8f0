"""Linear expressions, constraints and models: what `mathopt` has, named as there, without its checks.

A search makes dozens of models of thousands of rows, and with MathOpt's own expressions that took up to a third of its
time. What is made here becomes one of MathOpt's models when it is to be solved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt


class Linear:
    """A constant and variables, by number, with their coefficients. It does not change once it is made."""

    __slots__ = ("constant", "terms")

    def __init__(self, constant: float, terms: Mapping[int, float]) -> None:
        self.constant, self.terms = constant, terms

    def __add__(self, other: Linear | float) -> Linear:
        if not isinstance(other, Linear):
            return Linear(self.constant + other, self.terms)
        return fast_sum((self, other))

    __radd__ = __add__

    def __mul__(self, factor: float) -> Linear:
        return Linear(self.constant * factor, {v: coefficient * factor for v, coefficient in self.terms.items()})

    __rmul__ = __mul__

    def __neg__(self) -> Linear:
        return self * -1.0

    def __sub__(self, other: Linear | float) -> Linear:
        return self + -other

    def __rsub__(self, other: float) -> Linear:
        return -self + other

    def __ge__(self, other: Linear | float) -> Constraint:
        return Constraint(self - other, 0.0, math.inf)

    def __le__(self, other: Linear | float) -> Constraint:
        return Constraint(self - other, -math.inf, 0.0)

    def __eq__(self, other: object) -> Constraint:  # type: ignore[override]
        return Constraint(self - other, 0.0, 0.0)  # type: ignore[operator]

    __hash__ = None  # type: ignore[assignment]


class Variable(Linear):
    """Number ``id`` of its model's variables."""

    __slots__ = ("id",)

    def __init__(self, number: int) -> None:
        super().__init__(0.0, {number: 1.0})
        self.id = number


class Constraint:
    """``lower <= terms <= upper``."""

    __slots__ = ("lower", "terms", "upper")

    def __init__(self, expression: Linear, lower: float, upper: float) -> None:
        self.terms = expression.terms
        self.lower, self.upper = lower - expression.constant, upper - expression.constant


def fast_sum(summands: Iterable[Linear | float]) -> Linear:
    """The sum of expressions and numbers."""
    constant, terms = 0.0, dict[int, float]()
    for summand in summands:
        if isinstance(summand, Linear):
            constant += summand.constant
            for variable, coefficient in summand.terms.items():
                terms[variable] = terms.get(variable, 0.0) + coefficient
        else:
            constant += summand
    return Linear(constant, terms)


class Model:
    """What is to be minimised, variables with their limits, and constraints."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self.constraints: list[Constraint] = []
        self.objective = Linear(0.0, {})

    def add_variable(self, *, lb: float = -math.inf, ub: float = math.inf, is_integer: bool = False) -> Variable:
        """A variable between ``lb`` and ``ub``."""
        self.lower.append(lb)
        self.upper.append(ub)
        self.whole.append(is_integer)
        return Variable(len(self.lower) - 1)

    def add_integer_variable(self, *, lb: float, ub: float) -> Variable:
        """A variable that is a whole number."""
        return self.add_variable(lb=lb, ub=ub, is_integer=True)

    def add_binary_variable(self) -> Variable:
        """A variable that is 0 or 1."""
        return self.add_variable(lb=0.0, ub=1.0, is_integer=True)

    def add_linear_constraint(self, constraint: Constraint) -> None:
        """What has to hold."""
        self.constraints.append(constraint)

    def minimize(self, objective: Linear) -> None:
        """What is to be as small as it can be."""
        self.objective = objective

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """While this lasts no variable must be whole: the optimum is soon known, and no more than a bound."""
        whole, self.whole = self.whole, [False] * len(self.whole)
        try:
            yield
        finally:
            self.whole = whole

    def to_mathopt(self) -> Any:
        """The same as a model of MathOpt's, whose variables have these numbers."""
        proto = model_pb2.ModelProto(name=self.name)
        proto.variables.ids.extend(range(len(self.lower)))
        proto.variables.lower_bounds.extend(self.lower)
        proto.variables.upper_bounds.extend(self.upper)
        proto.variables.integers.extend(self.whole)
        proto.linear_constraints.ids.extend(range(len(self.constraints)))
        proto.linear_constraints.lower_bounds.extend(row.lower for row in self.constraints)
        proto.linear_constraints.upper_bounds.extend(row.upper for row in self.constraints)
        matrix = proto.linear_constraint_matrix
        for number, row in enumerate(self.constraints):
            terms = _sorted(row.terms)
            matrix.row_ids.extend([number] * len(terms))
            matrix.column_ids.extend(variable for variable, _ in terms)
            matrix.coefficients.extend(coefficient for _, coefficient in terms)
        proto.objective.offset = self.objective.constant
        for variable, coefficient in _sorted(self.objective.terms):
            proto.objective.linear_coefficients.ids.append(variable)
            proto.objective.linear_coefficients.values.append(coefficient)
        return mathopt.Model.from_model_proto(proto)


def _sorted(terms: Mapping[int, float]) -> list[tuple[int, float]]:
    return sorted((variable, coefficient) for variable, coefficient in terms.items() if coefficient)
