"""Facts of the queue: when each job is expected to start and to end."""

from __future__ import annotations

from ...schedulers.drawing import QueueBar, QueuePlot, queue_plot
from ..schemas import QueueEntry, QueueView

_SHORTEST_S = 1.0


def queue_facts(queue: QueueView, now: float) -> QueuePlot:
    """Running and waiting jobs as bars; ``now`` in Unix seconds. Jobs without an expected time are counted."""
    bars, unknown = [], 0
    for entry, running in (*((e, True) for e in queue.running), *((e, False) for e in queue.waiting)):
        if entry.expected_end is None or (entry.expected_start is None and not running):
            unknown += 1
            continue
        start_s = ((entry.started_at if running else entry.expected_start) or now) - now
        end_s = max(entry.expected_end - now, max(0.0, start_s) + _SHORTEST_S)
        where = entry.node or "" if running else ""
        bars.append(QueueBar(_label(entry), start_s if running else max(0.0, start_s), end_s, running, where))
    return queue_plot(bars, unknown)


def _label(entry: QueueEntry) -> str:
    return entry.name or entry.id or "somebody else's job"
