"""The overview: what the lab has, what it does, and what needs somebody."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starlette.responses import Response
from starlette.routing import Route

from ...platform.schemas import Health, JobView, NodeView, QueueEntry, QueueView
from ..web import Visit, page

_RECENT_S = 24 * 3600.0
_HOPELESS = ("closed", "no_node", "too_large", "no_plan")
_SLOW = 1.5
_SHOWN = 8


@dataclass
class Kind:
    """All GPUs of one kind."""

    name: str
    gpus: int = 0
    used: int = 0
    away: int = 0
    """On nodes that are lost, drained or not measured yet."""


@dataclass(frozen=True)
class Notice:
    """Something that somebody should look at."""

    tone: str
    text: str
    link: str
    word: str


def overview(visit: Visit) -> Response:
    """The page."""
    health: Health = visit.read("health")
    nodes: list[NodeView] = visit.read("nodes")
    queue: QueueView = visit.read("queue")
    ended: list[JobView] = visit.read("jobs", states=("FAILED", "REJECTED", "SUCCEEDED", "STOPPED"), limit=30)
    at_work = [entry for entry in queue.running if entry.state != "PAUSED"]
    speeds = [e.progress.tokens_per_s or 0.0 for e in at_work if e.progress is not None and e.state == "RUNNING"]
    return visit.show(
        "overview.html",
        health=health,
        nodes=nodes,
        kinds=kinds_of(nodes),
        waiting=queue.waiting,
        running=at_work,
        paused=len(queue.running) - len(at_work),
        shown=_SHOWN,
        tokens_per_s=sum(speeds) if speeds else None,
        notices=sorted(notices(health, nodes, queue, ended, time.time()), key=lambda notice: notice.tone != "bad"),
        ended=ended[:_SHOWN],
    )


def kinds_of(nodes: Sequence[NodeView]) -> list[Kind]:
    """GPUs by kind: how many there are, how many work, how many cannot be had."""
    found: dict[str, Kind] = defaultdict(lambda: Kind(""))
    for node in nodes:
        if not node.gpus:
            continue
        kind = found[node.kind]
        kind.name = node.kind
        kind.gpus += int(node.gpus)
        kind.used += node.busy
        if not usable(node):
            kind.away += max(0, int(node.gpus) - node.busy)
    return sorted(found.values(), key=lambda kind: kind.name)


def usable(node: NodeView) -> bool:
    """Whether the node takes new jobs."""
    return node.alive and node.measured and not node.drained


def notices(
    health: Health, nodes: Sequence[NodeView], queue: QueueView, ended: Sequence[JobView], now: float
) -> Iterator[Notice]:
    """What needs attention."""
    if health.leader is None:
        yield Notice("bad", "No controller leads: nothing is started or ended until one does.", "/nodes", "Nodes")
    yield from _node_notices(nodes)
    for entry in (*queue.running, *queue.waiting):
        yield from _job_notices(entry)
    for job in ended:
        if job.state in ("FAILED", "REJECTED") and now - (job.ended_at or 0.0) < _RECENT_S:
            yield Notice("bad", f"{job.name} {job.state.lower()}: {job.sentence}", f"/jobs/{job.id}", "Look")


def _node_notices(nodes: Sequence[NodeView]) -> Iterator[Notice]:
    for node in nodes:
        if not node.gpus:
            continue
        words = ""
        if not node.alive:
            words = "is not there any more"
        elif node.faults:
            words = f"had {node.faults} GPU or disk fault{'s' if node.faults > 1 else ''}"
        elif node.drained:
            words = f"takes no new jobs: {node.reason or 'drained'}"
        elif not node.measured:
            words = "waits to be measured"
        if words:
            tone = "bad" if not node.alive or node.faults else "warn"
            yield Notice(tone, f"Node {node.name} {words}.", f"/nodes#node-{node.name}", "Node")


def _job_notices(entry: QueueEntry) -> Iterator[Notice]:
    if entry.id is None:
        return
    link = f"/jobs/{entry.id}"
    if entry.state == "RECOVERING":
        yield Notice("warn", f"{entry.name}: {entry.sentence}", link, "Look")
    elif entry.state == "QUEUED" and entry.reason in _HOPELESS:
        yield Notice("warn", f"{entry.name} cannot start: {entry.sentence}", link, "Look")
    slow = _slowness(entry)
    if slow is not None and slow > _SLOW:
        yield Notice("warn", f"{entry.name} takes {slow:.1f} times the predicted time for a step.", link, "Look")


def _slowness(entry: QueueEntry) -> float | None:
    """Measured over predicted step time."""
    progress = entry.progress
    if progress is None or not progress.predicted_step_s or not progress.step_s:
        return None
    return progress.step_s / progress.predicted_step_s


routes = [Route("/", page(overview))]
