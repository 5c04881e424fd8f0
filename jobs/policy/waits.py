"""Leaves out the waits that follow from others, so that every wait of a program is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .program import Op


def without_implied(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The same operations with the fewest ``after`` that force the same order.

    A wait is implied when the operation before on the same stream, or another wait, comes after what it waits for.
    """
    position = {op.id: i for i, op in enumerate(ops)}
    ancestors: list[int] = []
    last: dict[str, int] = {}
    reduced = []
    for i, op in enumerate(ops):
        waits = sorted({position[name] for name in op.after}, reverse=True)
        known = 0
        if op.stream in last:
            known = ancestors[last[op.stream]] | (1 << last[op.stream])
        needed = []
        for j in waits:  # the latest first: a later operation may imply an earlier one, never the other way round
            if not (known >> j) & 1:
                needed.append(ops[j].id)
                known |= ancestors[j] | (1 << j)
        after = tuple(reversed(needed))
        reduced.append(op if after == op.after else replace(op, after=after))
        ancestors.append(known)
        last[op.stream] = i
    return tuple(reduced)
