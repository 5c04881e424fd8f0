"""What a person wants to know of prepared rows before a GPU is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .packing import first_fit
from .prepare import Prepared
from .rows import Rows, order
from .store import Counts

_BINS = 12


def check(prepared: Prepared, tokenizer: Any, *, batch: int, seed: int = 42, samples: int = 3) -> dict[str, Any]:
    """The report as JSON values, with ``lengths``, ``samples``, ``padding`` and ``worst_batch`` of the training rows.

    ``padding`` holds the share of computed tokens that are padding in the first epoch: one row a sequence, with rows
    of like length in a batch, and packed into sequences of the longest row. ``batch`` is rows of a step.
    """
    rows = prepared.train
    return {
        **prepared.report.to_dict(),
        "lengths": histogram(rows.lengths),
        "samples": [sample(rows, row, tokenizer) for row in _spread(len(rows), samples)],
        "batch": batch,
        "padding": padding(rows, batch=batch, seed=seed, together=prepared.together),
        "worst_batch": worst(rows, batch),
    }


def histogram(lengths: Counts) -> list[dict[str, int]]:
    """Rows by length, in at most 12 ranges of equal width; ``to`` is within the range."""
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // _BINS)
    counts = np.bincount((lengths - low) // width)
    return [
        {"from": low + at * width, "to": min(low + (at + 1) * width - 1, high), "rows": int(count)}
        for at, count in enumerate(counts)
    ]


def sample(rows: Rows, row: int, tokenizer: Any) -> dict[str, Any]:
    """A row decoded piece by piece, each with whether it carries the loss."""
    ids, pieces, at = rows.tokens(row), [], 0
    for start, stop in rows.spans(row):
        pieces += [(ids[at:start], False), (ids[start:stop], True)]
        at = stop
    pieces.append((ids[at:], False))
    return {
        "row": row,
        "tokens": len(ids),
        "pieces": [
            {"text": tokenizer.decode(piece.tolist()), "supervised": supervised}
            for piece, supervised in pieces
            if len(piece)
        ],
    }


def padding(rows: Rows, *, batch: int, seed: int, together: int = 1) -> dict[str, float]:
    """Share of padding among the tokens of an epoch, for each way to make batches."""
    lengths, longest = rows.lengths, rows.longest
    plain = order(rows, batch=batch, seed=seed, epoch=0, together=together)
    buckets = order(rows, batch=batch, seed=seed, epoch=0, buckets=True, together=together)
    return {
        "plain": _waste([[[row] for row in rows_of_step] for rows_of_step in plain], lengths),
        "buckets": _waste([[[row] for row in rows_of_step] for rows_of_step in buckets], lengths),
        "packed": _waste(
            [
                [[step[at] for at in sequence] for sequence in first_fit(lengths[step].tolist(), longest)]
                for step in plain
            ],
            lengths,
        ),
    }


def worst(rows: Rows, batch: int) -> dict[str, int]:
    """The batch of the longest rows."""
    longest = np.sort(rows.lengths)[::-1][:batch]
    width = int(longest.max(initial=0))
    return {"rows": len(longest), "width": width, "tokens": int(longest.sum()), "with_padding": width * len(longest)}


def _waste(steps: Sequence[Sequence[Sequence[int]]], lengths: Counts) -> float:
    used = computed = 0
    sizes = lengths.tolist()
    for step in steps:
        fills = [sum(sizes[row] for row in sequence) for sequence in step]
        used += sum(fills)
        computed += max(fills) * len(fills)
    return 1 - used / computed if computed else 0.0


def _spread(count: int, wanted: int) -> list[int]:
    wanted = min(count, wanted)
    return [at * count // wanted for at in range(wanted)]
