"""What many choices mean, all at once: a model's continuous variables at their least, and the rows that then fail.

In the exact program a row says when something ends at the earliest, or how much is in a memory, or that this is not too
much. Once the choices are made, all that is left is to go through the rows in order: no solver is needed for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from .linear import Model, Variable

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
_Bounds = tuple[int, float, tuple[int, int] | None, list[_Compiled]]
"""A variable's place, the least it may be, the row and the place that it is never below, and its other bounds."""


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

    def __init__(self, model: Model, step: Variable) -> None:
        self.step, size = step.id, len(model.lower)
        self.chosen_ones, self.lowest = np.array(model.whole), np.array(model.lower)
        self.times = np.array(model.upper) == 1.0
        self.rows: list[_Row] = []
        self.fixed: Array = []
        self.columns: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for constraint in model.constraints:
            self._add(sorted(constraint.terms.items()), constraint.lower, constraint.upper)
        self.fixed = np.array(self.fixed)
        self.never_below = self.fixed.copy()
        """The least that the fixed parts can be."""
        self.effects = _Effects(self.columns, size)
        np.add.at(self.never_below, self.effects.rows, np.minimum(self.effects.factors, 0.0))
        self.continuous = [v for v in range(size) if not self.chosen_ones[v]]
        order = list(self._ordered())
        self.place = {variable: place for place, (variable, _) in enumerate(order)}
        self.program = [self._bounds(place, variable, rows) for place, (variable, rows) in enumerate(order)]
        self.time_places = [place for place, (variable, _) in enumerate(order) if self.times[variable]]
        self.checks = [number for number, row in enumerate(self.rows) if row.variable == CHECK]
        self.check_terms = self._terms_of_checks()
        self.room: Array = np.empty(0)

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

    def _bounds(self, place: int, variable: int, rows: list[int]) -> _Bounds:
        """What bounds a variable, first of all what is never below the least that it may be."""
        bounds, lowest = [self._compiled(row) for row in rows], self.lowest[variable]
        bounds.sort(key=lambda bound: not self._reaches(lowest, *bound))
        begins = bool(bounds) and self._reaches(lowest, *bounds[0])
        return place, lowest, bounds[0][:2] if begins else None, bounds[begins:]

    def _reaches(self, lowest: float, row: int, first: int, others: Sequence[Any]) -> bool:
        """Whether a row without factors is never below ``lowest``, whatever is chosen."""
        if first < 0 or others:
            return False
        return bool(self.never_below[row] + self.lowest[self.rows[row].terms[0][0]] >= lowest)

    def _compiled(self, row: int) -> _Compiled:
        """The row, a variable that it adds as it is (-1 if none), and the others with their factors, by place."""
        terms = [(self.place[v], factor) for v, factor in self.rows[row].terms]
        plain = next((k for k, (_, factor) in enumerate(terms) if factor == 1.0), None)
        if plain is None:
            return row, -1, terms
        return row, terms[plain][0], terms[:plain] + terms[plain + 1 :]

    def _terms_of_checks(self) -> list[tuple[Array, Array, Array]]:
        """The first terms of the checks that have any, the second ones, ...: which checks, places, and factors."""
        terms = [[(self.place[v], factor) for v, factor in self.rows[row].terms] for row in self.checks]
        most = max(map(len, terms), default=0)
        having = [[number for number, own in enumerate(terms) if len(own) > k] for k in range(most)]
        return [
            (np.array(rows), np.array([terms[n][k][0] for n in rows]), np.array([[terms[n][k][1]] for n in rows]))
            for k, rows in enumerate(having)
        ]

    def base(self, chosen: Iterable[int]) -> Array:
        """The fixed part of every row with these choices, float64 of one entry per row: what `least` starts from."""
        base = self.fixed.copy()
        rows, factors, _ = self.effects.of([sorted(chosen)])
        np.add.at(base, rows, factors)
        return base

    def least(self, base: Array, changes: Sequence[Change]) -> Least:
        """What each change of the choices that ``base`` was made of leads to."""
        fixed, values = self._buffers(len(changes))
        fixed[:] = base[:, None]
        for side, add in enumerate((np.subtract, np.add)):
            rows, factors, numbers = self.effects.of([change[side] for change in changes])
            add.at(fixed.reshape(-1), rows * len(changes) + numbers, factors)
        spare = np.empty(len(changes))
        for place, lowest, begin, bounds in self.program:
            value = values[place]
            if begin is None:
                value.fill(lowest)
            else:
                np.add(fixed[begin[0]], values[begin[1]], out=value)
            for row, first, others in bounds:
                np.add(fixed[row], values[first], out=spare) if first >= 0 else np.copyto(spare, fixed[row])
                for other, factor in others:
                    spare += factor * values[other]
                np.maximum(value, spare, out=value)
        beyond = fixed[self.checks]
        for which, places, factors in self.check_terms:
            beyond[which] += values[places] * factors
        np.maximum(beyond, 0.0, out=beyond)
        ends = values[self.time_places].mean(axis=0)
        return Least(values[self.place[self.step]].copy(), ends, beyond.max(axis=0, initial=0.0), beyond.sum(axis=0))

    def _buffers(self, changes: int) -> tuple[Array, Array]:
        """Room for rows and for variables, a column per change. It stays: to get that much anew takes as long."""
        size = (len(self.rows) + len(self.place)) * changes
        if self.room.size < size:
            self.room = np.empty(size)
        both = self.room[:size].reshape(-1, changes)
        return both[: len(self.rows)], both[len(self.rows) :]


class _Effects:
    """What choices add to the rows' fixed parts: all of it one after the other, and where that of each begins."""

    def __init__(self, columns: Mapping[int, Sequence[tuple[int, float]]], size: int) -> None:
        entries = [entry for variable in range(size) for entry in columns.get(variable, ())]
        self.rows = np.array([row for row, _ in entries], dtype=np.intp)
        self.factors = np.array([factor for _, factor in entries], dtype=float)
        self.count = np.array([len(columns.get(variable, ())) for variable in range(size)], dtype=np.intp)
        self.begin = np.cumsum(self.count) - self.count

    def of(self, choices: Sequence[Sequence[int]]) -> tuple[Array, Array, Array]:
        """Rows, what is added to them, and for which of ``choices``."""
        variables = np.fromiter(chain.from_iterable(choices), dtype=np.intp)
        count = self.count[variables]
        numbers = np.repeat(np.arange(len(choices)), [len(chosen) for chosen in choices])
        where = np.repeat(self.begin[variables] - np.cumsum(count) + count, count) + np.arange(count.sum())
        return self.rows[where], self.factors[where], np.repeat(numbers, count)
