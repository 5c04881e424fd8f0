"""Where a run stands in its rows: a few numbers from which the rest of the epoch follows.

The order of an epoch depends on the batch. A run that goes on with another batch uses the rows that the epoch has left,
in an order of their own; so every row is used once in every epoch, whatever happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..data import Rows, order


@dataclass
class Position:
    """Batches that were used: those of whole epochs, and, of the present one, how many of which size."""

    steps: int = 0
    """Batches used so far, of all epochs: steps taken, and steps skipped for a gradient that was not finite."""
    epoch: int = 0
    used: list[list[int]] = field(default_factory=list)
    """``[batch, batches]`` of the present epoch, in turn."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Position:
        """What `to_dict` gave."""
        return cls(values["steps"], values["epoch"], [list(pair) for pair in values["used"]])

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"steps": self.steps, "epoch": self.epoch, "used": [list(pair) for pair in self.used]}

    def advance(self, left: int) -> None:
        """One batch more was used; ``left`` batches are left of the epoch then."""
        self.steps += 1
        self.used[-1][1] += 1
        if left == 0:
            self.epoch, self.used = self.epoch + 1, []


class RowOrder:
    """The batches of a run as indices of rows: a pure function of rows, seed, batch and position."""

    def __init__(self, rows: Rows, *, batch: int, seed: int, buckets: bool, together: int = 1) -> None:
        """``together`` rows that follow each other always share a batch."""
        self.rows, self.batch, self.seed, self.buckets, self.together = rows, batch, seed, buckets, together

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch."""
        return -(-len(self.rows) // self.batch)

    def steps(self, position: Position, epochs: int) -> int:
        """Steps of a run of so many epochs that stands there: those it has taken and those that are left."""
        if position.epoch >= epochs:
            return position.steps
        left = len(self._left(position)[0])
        return position.steps + left + self.batches_per_epoch * (epochs - position.epoch - 1)

    def remaining(self, position: Position) -> Iterator[tuple[list[int], int]]:
        """The batches that the present epoch has left, each with the number of those behind it."""
        batches, used = self._left(position)
        position.used = used
        for at, batch in enumerate(batches):
            yield batch, len(batches) - at - 1

    def _left(self, position: Position) -> tuple[list[list[int]], list[list[int]]]:
        """Batches left of the epoch, and what was used of it, with an entry for this batch at its end."""
        used = [list(pair) for pair in position.used]
        if not used or used[-1][0] != self.batch:
            used.append([self.batch, 0])
        left = np.arange(len(self.rows))
        for size, count in used[:-1]:
            taken = [row for batch in self._batches(left, size, position.epoch)[:count] for row in batch]
            left = np.setdiff1d(left, np.asarray(taken, dtype=np.int64))
        return self._batches(left, self.batch, position.epoch)[used[-1][1] :], used

    def _batches(self, left: np.ndarray[Any, Any], size: int, epoch: int) -> list[list[int]]:
        rows = self.rows if len(left) == len(self.rows) else self.rows.take(left)
        drawn = order(rows, batch=size, seed=self.seed, epoch=epoch, buckets=self.buckets, together=self.together)
        return [[int(left[row]) for row in batch] for batch in drawn]
