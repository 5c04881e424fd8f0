"""A run whose neighbours have changed is planned again for those that it has now, and switched if that pays.

The answer is taken up as that to a drift is: see `drift`.
"""

from __future__ import annotations

from ...jobs.lifecycle import JobState
from ...schedulers.placement import NodeState, RunningJob
from ...schedulers.placement import Question as Asked
from ..admission import Question
from ..store import Job
from .desk import Desk
from .drift import ends_soon, values_of
from .drifts import PREFIX
from .question import Table
from .together import beside_each, finite_node


def look_at_company(desk: Desk, asked: Asked, table: Table) -> None:
    """Ask planning about every run that has other neighbours than when it was last planned."""
    for node in asked.nodes:
        _look_at_node(desk, asked, table, node)


def _look_at_node(desk: Desk, asked: Asked, table: Table, node: NodeState) -> None:
    here = [job for job in asked.running if job.node == node.name and job.gpu is not None]
    runs = {job.id: job for job in here}

    def look(job: Job) -> None:
        _look(desk, job, runs[job.id], node, here)

    desk.for_each([table.running[name] for name in runs], look)


def _look(desk: Desk, job: Job, run: RunningJob, node: NodeState, here: list[RunningJob]) -> None:
    drifts, claim = desk.notes.drifts, job.claim
    if claim is None:
        return
    company = frozenset(other.id for other in here if other is not run)
    if drifts.company.setdefault(claim, company) == company or claim in drifts.asked:
        return
    look = desk.notes.looks.get(claim)
    if job.state is not JobState.RUNNING or look is None or not look.step_s:
        return  # once it trains
    drifts.company[claim] = company
    values = None if ends_soon(look) else values_of(desk, job, claim)
    if values is None:
        return
    roots = {gpu.id: gpu.pcie_root for gpu in node.gpus}
    others = beside_each([other for other in here if other is not run], roots)
    values |= {"node": finite_node(node), "root": roots[run.gpu or ""], "beside": others}
    drifts.asked.add(claim)
    desk.planner.submit(Question(job=PREFIX + claim, kind="company", values=values, priority=0))
