"""Every row once in every epoch, wherever a run is cut and with whatever batch it goes on."""

from __future__ import annotations

import random

import pytest

from lazytrain.jobs.data import Rows
from lazytrain.jobs.train.position import Position, RowOrder


def rows(count: int) -> Rows:
    made = Rows(fingerprint="f")
    for i in range(count):
        made.append([1] * (2 + i * 7 % 11), 1, "p", "a")
    return made


def walk(
    data: Rows, sizes: list[tuple[int, int]], *, epochs: int, together: int = 1, buckets: bool = True
) -> tuple[list[list[int]], int]:
    """Rows of every epoch, when so many batches of each size are taken in turn, and the last one to the end."""
    position, used = Position(), [[] for _ in range(epochs)]
    for size, count in sizes:
        position = Position.from_dict(position.to_dict())  # as from a checkpoint
        order = RowOrder(data, batch=size, seed=3, buckets=buckets, together=together)
        expected = order.steps(position, epochs)
        taken = 0
        while position.epoch < epochs and taken < count:
            for batch, left in order.remaining(position):
                used[position.epoch] += batch
                position.advance(left)
                taken += 1
                if taken == count:
                    break
    assert position.steps == expected
    return used, position.steps


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_every_row_once_in_every_epoch(seed: int, together: int) -> None:
    drawn = random.Random(seed)
    data = rows(38)
    sizes = [(together * drawn.randint(1, 6), drawn.randint(1, 9)) for _ in range(4)] + [(4, 10**6)]
    used, _ = walk(data, sizes, epochs=3, together=together, buckets=seed % 2 == 0)
    assert [sorted(epoch) for epoch in used] == [list(range(38))] * 3
    if together == 2:
        assert all(epoch[at] + 1 == epoch[at + 1] and epoch[at] % 2 == 0 for epoch in used for at in range(0, 38, 2))


def test_an_interruption_changes_nothing() -> None:
    plain, steps = walk(rows(38), [(4, 10**6)], epochs=2)
    cut, again = walk(rows(38), [(4, 3), (4, 8), (4, 10**6)], epochs=2)
    assert (sorted(cut[0]), steps) == (sorted(plain[0]), again)
    buckets = RowOrder(rows(38), batch=4, seed=3, buckets=True)
    whole = [batch for batch, _ in buckets.remaining(Position())]
    later = [batch for batch, _ in buckets.remaining(Position(steps=3, used=[[4, 3]]))]
    assert later == whole[3:]
