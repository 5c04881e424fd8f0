"""Jobs that start where others run, or with others: their plans are made together, for what each gets of the node.

A job that is already running keeps its policy; the new ones are planned for what it leaves, and all of them are told
what they reach beside each other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...jobs.errors import LazytrainError
from ...jobs.frozen import digest
from ...jobs.lifecycle import JobState
from ...schedulers.placement import Decisions, NodeState, Question, RunningJob, Start
from ...schedulers.placement.sharing import speeds
from ..admission import Question as PlannerQuestion
from ..admission import Way
from ..artifacts import JobFiles
from ..store import Job
from .admission import LESS
from .desk import Desk
from .meetings import PREFIX
from .question import Table
from .searched import wants_search

_TRAINS = "running"
"""Reason of a job that nothing else is to be said about."""
_AS_ALONE = 0.995
_PATIENCE_S = 120.0
"""Longest wait of a job for which there is a place: after that it starts by the plan that it has."""


@dataclass(frozen=True)
class Meeting:
    """What a job starts with that was planned together with others."""

    way: Way
    words: str


def ready(
    desk: Desk, decisions: Decisions, asked: Question, table: Table
) -> tuple[dict[str, Start], dict[str, Meeting]]:
    """The starts that can be made now, by job, and what those start with that were planned together.

    The others wait until planning has answered, for two minutes at most.
    """
    meetings = desk.notes.meetings
    starts = {start.job: start for start in decisions.starts}
    meetings.since = {name: at for name, at in meetings.since.items() if name in starts}
    met: dict[str, Meeting] = {}
    by_node: dict[str, list[Start]] = defaultdict(list)
    for start in decisions.starts:
        if start.node in decisions.crowded and not _measures(desk, start, table):
            by_node[start.node].append(start)
    meetings.asked = {node: name for node, name in meetings.asked.items() if node in by_node}
    for node, here in by_node.items():
        found = _answer(desk, node, here, asked, table)
        if found is not None:
            met |= found
            continue
        for start in here:
            del starts[start.job]
            _hold(desk, table.waiting[start.job], start)
    return starts, met


def _measures(desk: Desk, start: Start, table: Table) -> bool:
    """Whether it tries batches out beside its neighbours, which tells more than a plan."""
    return wants_search(desk, table.waiting[start.job], start.option.seconds)


def _hold(desk: Desk, job: Job, start: Start) -> None:
    words = f"a GPU of {start.node} is free for it: it is planned together with the jobs with which it shares the node"
    desk.tell(job, "planned_together", words)


def _answer(desk: Desk, node: str, here: Sequence[Start], asked: Question, table: Table) -> dict[str, Meeting] | None:
    """By job; nothing for one that goes by the plan that it has; None while nothing is known yet."""
    meetings = desk.notes.meetings
    values = _values(desk, node, here, asked, table)
    name = f"{PREFIX}{node}-{digest(values)[:12]}"
    waited = max(desk.steady() - meetings.since.setdefault(start.job, desk.steady()) for start in here)
    if meetings.asked.get(node) != name:
        meetings.asked[node] = name
        desk.planner.submit(PlannerQuestion(job=name, kind="together", values=values))
    meetings.answers = {one: found for one, found in meetings.answers.items() if one in meetings.asked.values()}
    answer = meetings.answers.get(name)
    if answer is None:
        return None if waited < _PATIENCE_S else {}
    if isinstance(answer, LazytrainError):
        return {}
    found = zip(here, answer.values["ways"], answer.values["tokens_per_s"], strict=False)
    others = [start.job for start in here] + [job.id for job in asked.running if job.node == node and job.gpu]
    return {
        start.job: Meeting(Way.model_validate(way), _words(node, [one for one in others if one != start.job], rate))
        for start, way, rate in found
    }


def _words(node: str, others: Sequence[str], tokens_per_s: float) -> str:
    beside = ", ".join(others)
    return f"starts on {node}, planned together with {beside}: {tokens_per_s:,.0f} tokens/s are expected beside them"


def _values(desk: Desk, node: str, here: Sequence[Start], asked: Question, table: Table) -> dict[str, Any]:
    state = next(one for one in asked.nodes if one.name == node)
    roots = {gpu.id: gpu.pcie_root for gpu in state.gpus}
    return {
        "profile": dict(table.nodes[node].profile),
        "node": finite_node(state),
        "starting": [_starting(table.waiting[start.job], start, roots, table) for start in here],
        "beside": beside_each([job for job in asked.running if job.node == node and job.gpu is not None], roots),
    }


def beside_each(running: Sequence[RunningJob], roots: Mapping[str, str]) -> list[dict[str, Any]]:
    """Jobs that have a GPU of a node, with its PCIe root, for planning beside them."""
    return [{"option": {**asdict(job.option), "work_tokens": 0.0}, "root": roots[job.gpu or ""]} for job in running]


def finite_node(state: NodeState) -> dict[str, Any]:
    """Without the links of which nobody knows where they end: JSON has no infinity, and `NodeState` means it."""
    return {name: value for name, value in asdict(state).items() if value != math.inf}


def _starting(job: Job, start: Start, roots: Mapping[str, str], table: Table) -> dict[str, Any]:
    return {
        "spec": dict(job.spec),
        "cache": str(JobFiles(job.run_dir).path / "rows"),
        "memory_share": LESS**job.replans,
        "batch": table.plans[job.id].batch,
        "host_bytes": start.option.host_bytes,
        "root": roots[start.gpu],
    }


def tell_neighbours(desk: Desk, asked: Question, table: Table) -> None:
    """Let the jobs of nodes whose links are short know how fast they are beside each other."""
    words: dict[str, str] = {}
    for node in asked.nodes:
        words |= _beside_each_other(node, [job for job in asked.running if job.node == node.name and job.gpu])
    here = [table.running[name] for name in words]

    def tell(job: Job) -> None:
        desk.tell(job, _TRAINS, words[job.id])

    desk.for_each([job for job in here if (job.state, job.reason) == (JobState.RUNNING, _TRAINS)], tell)


def _beside_each_other(node: NodeState, here: Sequence[RunningJob]) -> dict[str, str]:
    roots = {gpu.id: gpu.pcie_root for gpu in node.gpus}
    reached = speeds([(job.option, roots[job.gpu or ""]) for job in here], node)
    words = {job.id: f"trains on {node.name}" for job in here}
    for job, speed in zip(here, reached, strict=True):
        if speed < _AS_ALONE:
            others = ", ".join(other.id for other in here if other is not job)
            rate = f"{job.option.tokens_per_s * speed:,.0f} tokens/s are expected"
            words[job.id] += f" beside {others}: {rate}, {100 * speed:.0f} % of its speed alone"
    return words
