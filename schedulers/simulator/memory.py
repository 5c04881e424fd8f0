"""Bytes in each tier over time, exactly, from when operations ran.

On the host and on NVMe a buffer is in use from the start of the operation that fills it to the end of those that read
it. The GPU's memory follows its compute alone, in the executor as in a GPU's allocator: the host hands a copy over, and
takes the memory that it fills, as soon as compute has come to its place in the program; and what a copy reads is free
for other uses once compute has waited for the copy, however long ago that had ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...jobs.policy import Program

TIERS = ("gpu", "host", "nvme")
_Moment = tuple[float, int]
"""Seconds, then a rank for what happens at the same time."""
_Change = tuple[_Moment, int]
"""When, and by how many bytes."""


def peak_bytes(program: Program, starts: Sequence[float], ends: Sequence[float]) -> dict[str, int]:
    """Highest use of each tier, copies in flight and working memory included."""
    return {tier: max((used for _, used in memory_over_time(program, starts, ends, tier)), default=0) for tier in TIERS}


def memory_over_time(
    program: Program, starts: Sequence[float], ends: Sequence[float], tier: str
) -> list[tuple[float, int]]:
    """Steps of (seconds, bytes in use from then on), in order. At equal times the order of the program decides."""
    changes = _on_gpu(program, starts, ends) if tier == "gpu" else _elsewhere(program, starts, ends, tier)
    used, course = 0, []
    for (second, _), size in sorted(changes):
        used += size
        course.append((second, used))
    return course


def _on_gpu(program: Program, starts: Sequence[float], ends: Sequence[float]) -> Iterator[_Change]:
    """`Program.moments` are the ranks: the odd ones are compute operations, the even ones lie between them."""
    compute = [position for position, op in enumerate(program.ops) if op.stream == "compute"]
    times = [0.0]
    for position in compute:
        times += [starts[position], ends[position]]
    times.append(max(ends, default=0.0))
    for buffer, (first, gone) in zip(program.buffers, program.moments, strict=True):
        if buffer.tier == "gpu" and buffer.bytes:
            yield (times[first], first), buffer.bytes
            if buffer.released_by:
                yield (times[gone], gone), -buffer.bytes
    for k, position in enumerate(compute):
        if size := program.ops[position].workspace_bytes:
            yield (times[2 * k + 1], 2 * k + 1), size
            yield (times[2 * k + 2], 2 * k + 2), -size


def _elsewhere(program: Program, starts: Sequence[float], ends: Sequence[float], tier: str) -> Iterator[_Change]:
    """Ranks are 2k for the start of operation k, 2k + 1 for its end, -1 for the start of the step."""
    for buffer in program.buffers:
        if buffer.tier != tier or not buffer.bytes:
            continue
        acquired = program.index[buffer.acquired_by] if buffer.acquired_by else -1
        yield ((starts[acquired], 2 * acquired) if acquired >= 0 else (0.0, -1)), buffer.bytes
        released = [program.index[name] for name in buffer.released_by]
        if released:
            yield max((ends[k], 2 * k + 1) for k in released), -buffer.bytes
