"""Bytes in each tier over time, exactly, from when operations ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...jobs.policy import Program

TIERS = ("gpu", "host", "nvme")
_Moment = tuple[float, int]
"""Seconds, then a rank for what happens at the same time: 2k for the start of operation k, 2k + 1 for its end."""


def peak_bytes(program: Program, starts: Sequence[float], ends: Sequence[float]) -> dict[str, int]:
    """Highest use of each tier, copies in flight and working memory included."""
    return {tier: max((used for _, used in memory_over_time(program, starts, ends, tier)), default=0) for tier in TIERS}


def memory_over_time(
    program: Program, starts: Sequence[float], ends: Sequence[float], tier: str
) -> list[tuple[float, int]]:
    """Steps of (seconds, bytes in use from then on), in order. At equal times the order of the program decides."""
    changes = sorted(_changes(program, starts, ends, tier))
    used, course = 0, []
    for (second, _), size in changes:
        used += size
        course.append((second, used))
    return course


def _changes(
    program: Program, starts: Sequence[float], ends: Sequence[float], tier: str
) -> Iterator[tuple[_Moment, int]]:
    for buffer in program.buffers:
        if buffer.tier != tier or not buffer.bytes:
            continue
        acquired = program.index[buffer.acquired_by] if buffer.acquired_by else -1
        yield ((starts[acquired], 2 * acquired) if acquired >= 0 else (0.0, -1)), buffer.bytes
        released = [program.index[name] for name in buffer.released_by]
        if released:
            yield max((ends[k], 2 * k + 1) for k in released), -buffer.bytes
    if tier == "gpu":
        for k, op in enumerate(program.ops):
            if op.workspace_bytes:
                yield (starts[k], 2 * k), op.workspace_bytes
                yield (ends[k], 2 * k + 1), -op.workspace_bytes
