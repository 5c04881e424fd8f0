"""A step program with the seconds of every operation becomes a timeline.

Operations stand in an order in which everything that one waits for comes before it. So one pass over the list settles
every event: an operation starts when its stream is free and all that it waits for has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...jobs.policy import Program
from ...jobs.timeline import STREAMS, Span, Timeline
from .memory import peak_bytes


def run(program: Program, seconds: Sequence[float], *, at_least_s: float = 0.0) -> Timeline:
    """The timeline of ``program`` when operation k takes ``seconds[k]``.

    The updates of the step before stand at its start and the clip at its end waits for every gradient, so the step time
    is the period of training. ``at_least_s`` is what the operations need of something that all of them share, the
    bandwidth of host memory; where that is more than the longest path, the difference is exposed as ``host``. Raises
    ValueError unless there is one duration, not negative, per operation.
    """
    if len(seconds) != len(program.ops) or any(second < 0 for second in seconds):
        raise ValueError("a duration that is not negative is needed for each operation of the program")
    starts, ends, waited_for = _schedule(program, seconds)
    path_s = max(ends, default=0.0)
    step_s = max(path_s, at_least_s)
    exposed_s = _exposed(program, starts, ends, waited_for, path_s)
    if step_s > path_s:
        exposed_s["host"] = step_s - path_s
    return Timeline(
        spans=[
            Span(op.id, op.stream, start, end, op.bytes)
            for op, start, end in zip(program.ops, starts, ends, strict=True)
        ],
        step_s=step_s,
        exposed_s=exposed_s,
        peak_bytes=peak_bytes(program, starts, ends),
    )


def period(program: Program, seconds: Sequence[float]) -> float:
    """The step time alone, as `run` has it without ``at_least_s``."""
    return max(_schedule(program, seconds)[1], default=0.0)


def _schedule(program: Program, seconds: Sequence[float]) -> tuple[list[float], list[float], list[int]]:
    """Start and end of each operation, and the position of the one that it waited for last (-1: it did not wait)."""
    index = program.index
    starts: list[float] = []
    ends: list[float] = []
    waited_for: list[int] = []
    last: dict[str, int] = {}
    for position, op in enumerate(program.ops):
        start, latest = 0.0, -1
        previous = last.get(op.stream, -1)
        if previous >= 0:
            start, latest = ends[previous], previous
        for name in op.after:
            other = index[name]
            if ends[other] > start:
                start, latest = ends[other], other
        starts.append(start)
        ends.append(start + seconds[position])
        waited_for.append(latest)
        last[op.stream] = position
    return starts, ends, waited_for


def _exposed(
    program: Program, starts: list[float], ends: list[float], waited_for: list[int], step_s: float
) -> dict[str, float]:
    """Seconds for which compute was idle, given to the stream that was at work on what compute needed next.

    The idle time before an operation belongs to what it waited for; as far as that one had waited itself, to what *it*
    waited for, and so on. The parts add up to all of compute's idle time, the end of the step included.
    """
    exposed = {stream: 0.0 for stream in STREAMS if stream != "compute"}
    free_at = 0.0
    for position, op in enumerate(program.ops):
        if op.stream == "compute":
            _charge(program, starts, waited_for, exposed, waited_for[position], starts[position], free_at)
            free_at = ends[position]
    final = max(range(len(ends)), key=ends.__getitem__, default=-1)
    _charge(program, starts, waited_for, exposed, final, step_s, free_at)
    return exposed


def _charge(
    program: Program,
    starts: list[float],
    waited_for: list[int],
    exposed: dict[str, float],
    blocker: int,
    until: float,
    since: float,
) -> None:
    while until > since:
        begun = max(starts[blocker], since)
        exposed[program.ops[blocker].stream] += until - begun
        until, blocker = begun, waited_for[blocker]
