"""What many choices mean, all at once: a model's continuous variables at their least, and the rows that then fail.

In the exact program a row says when something ends at the earliest, or how much is in a memory, or that this is not too
much. Once the choices are made, all that is left is to go through the rows in order: no solver is needed for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

Array = Any
Change = tuple[list[int], list[int]]
"""Choices that are no longer made, and those that are instead, by the solver's number of their variables."""
CHECK: Final = -1
"""In place of a variable, where a row is no lower bound of any."""


class Least(NamedTuple):
    """Of each of several changes: float arrays, one entry per change."""

    step: Array
    """Step time over the horizon."""
    ends: Array
    """Mean of the times at which operations end, over the horizon."""
    beyond: Array
    """By how much the row that fails most does; 0 where every row holds."""
    in_all: Array
    """By how much all rows do that fail."""


_Compiled = tuple[int, int, list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class _Row:
    """``variable >= fixed part + terms``, or ``0 >=`` that."""

    variable: int
    terms: list[tuple[int, float]]
    """Other continuous variables, with their factors."""


class Rows:
    """The rows of a model, in an order in which what one needs comes before it.

    Every row is to be a lower bound of at most one continuous variable, or to be what others say of it with equality.
    Raises ValueError where a variable needs itself, as it may where blocks recompute and there is NVMe too.
    """

    def __init__(self, model: Any, step: Any) -> None:
        proto = model.export_model()
        variables, constraints = proto.variables, proto.linear_constraints
        self.step, size = step.id, max(variables.ids) + 1
        self.chosen_ones, self.times, self.lowest = (np.zeros(size, kind) for kind in (bool, bool, float))
        self.chosen_ones[variables.ids] = variables.integers
        self.times[variables.ids] = np.array(variables.upper_bounds) == 1.0
        self.lowest[variables.ids] = variables.lower_bounds
        self.rows: list[_Row] = []
        self.fixed: Array = []
        self.columns: dict[int, list[tuple[int, float]]] = defaultdict(list)
        terms = _terms(proto.linear_constraint_matrix)
        for row, low, high in zip(
            constraints.ids, constraints.lower_bounds, constraints.upper_bounds, strict=True
        ):  # fmt: skip
            self._add(terms.get(row, []), low, high)
        self.fixed = np.array(self.fixed)
        self.effects = {
            column: (np.array([row for row, _ in entries]), np.array([factor for _, factor in entries]))
            for column, entries in self.columns.items()
        }
        self.continuous = [v for v in variables.ids if not self.chosen_ones[v]]
        order = list(self._ordered())
        self.place = {variable: place for place, (variable, _) in enumerate(order)}
        self.program: list[tuple[int, float, list[_Compiled]]] = [
            (place, self.lowest[variable], [self._compiled(row) for row in rows])
            for place, (variable, rows) in enumerate(order)
        ]
        self.time_places = [place for place, (variable, _) in enumerate(order) if self.times[variable]]
        self.checks = [number for number, row in enumerate(self.rows) if row.variable == CHECK]

    def _add(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        """One row for each side on which it is bounded; where that is both, only the last variable is bounded by it."""
        last = max((v for v, _ in terms if not self.chosen_ones[v]), default=CHECK)
        for sign, limit in ((1.0, low), (-1.0, -high)):
            if not np.isfinite(limit):
                continue
            signed = [(v, sign * factor) for v, factor in terms]
            above = [v for v, factor in signed if factor > 0 and not self.chosen_ones[v]]
            if low == high and last != CHECK and last not in above:
                continue
            self._add_side(signed, limit, max(above, default=CHECK))

    def _add_side(self, terms: list[tuple[int, float]], limit: float, variable: int) -> None:
        own = dict(terms)[variable] if variable != CHECK else 1.0
        others = [(v, -factor / own) for v, factor in terms if v != variable]
        number = len(self.rows)
        self.rows.append(_Row(variable, [(v, factor) for v, factor in others if not self.chosen_ones[v]]))
        self.fixed.append(limit / own)
        for v, factor in others:
            if self.chosen_ones[v]:
                self.columns[v].append((number, factor))

    def _ordered(self) -> Iterator[tuple[int, list[int]]]:
        """Continuous variables with the rows that bound them, each after those that they need."""
        bounding: dict[int, list[int]] = defaultdict(list)
        for number, row in enumerate(self.rows):
            if row.variable != CHECK:
                bounding[row.variable].append(number)
        begun: set[int] = set()
        known: set[int] = set()
        for variable in self.continuous:
            stack = [(variable, False)]
            while stack:
                here, finished = stack.pop()
                if finished:
                    if not known.issuperset(v for number in bounding.get(here, []) for v, _ in self.rows[number].terms):
                        raise ValueError("the rows of the model have no order")
                    known.add(here)
                    yield here, bounding.get(here, [])
                elif here not in begun:
                    begun.add(here)
                    needed = [v for number in bounding.get(here, []) for v, _ in self.rows[number].terms]
                    stack += [(here, True), *((v, False) for v in needed if v not in begun)]

    def _compiled(self, row: int) -> _Compiled:
        """The row, a variable that it adds as it is (-1 if none), and the others with their factors, by place."""
        terms = [(self.place[v], factor) for v, factor in self.rows[row].terms]
        plain = next((k for k, (_, factor) in enumerate(terms) if factor == 1.0), None)
        if plain is None:
            return row, -1, terms
        return row, terms[plain][0], terms[:plain] + terms[plain + 1 :]

    def base(self, chosen: Iterable[int]) -> Array:
        """The fixed part of every row with these choices, float64 of one entry per row: what `least` starts from."""
        base = self.fixed.copy()
        for variable in chosen:
            if variable in self.effects:
                rows, factors = self.effects[variable]
                base[rows] += factors
        return base

    def least(self, base: Array, changes: Sequence[Change]) -> Least:
        """What each change of the choices that ``base`` was made of leads to."""
        fixed = np.repeat(base[:, None], len(changes), axis=1)
        for sign, side in ((-1.0, 0), (1.0, 1)):
            pairs = [(n, v) for n, change in enumerate(changes) for v in change[side] if v in self.effects]
            if pairs:
                rows = np.concatenate([self.effects[v][0] for _, v in pairs])
                factors = np.concatenate([self.effects[v][1] for _, v in pairs])
                numbers = np.repeat([n for n, _ in pairs], [len(self.effects[v][0]) for _, v in pairs])
                np.add.at(fixed, (rows, numbers), sign * factors)
        values, spare = np.empty((len(self.place), len(changes))), np.empty(len(changes))
        for place, lowest, bounds in self.program:
            value = values[place]
            value.fill(lowest)
            for row, first, others in bounds:
                np.add(fixed[row], values[first], out=spare) if first >= 0 else np.copyto(spare, fixed[row])
                for other, factor in others:
                    spare += factor * values[other]
                np.maximum(value, spare, out=value)
        beyond, in_all = np.zeros(len(changes)), np.zeros(len(changes))
        for row in self.checks:
            here = fixed[row]
            for variable, factor in self.rows[row].terms:
                here = here + factor * values[self.place[variable]]
            np.maximum(beyond, here, out=beyond)
            in_all += np.maximum(here, 0.0)
        return Least(values[self.place[self.step]], values[self.time_places].mean(axis=0), beyond, in_all)


def _terms(matrix: Any) -> dict[int, list[tuple[int, float]]]:
    """The variables of each row, with their factors."""
    terms: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for row, column, factor in zip(matrix.row_ids, matrix.column_ids, matrix.coefficients, strict=True):
        terms[row].append((column, factor))
    return terms
