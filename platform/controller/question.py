"""What placement is asked: the store's jobs and nodes as its values."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ...jobs.lifecycle import JobState
from ...schedulers.copies import CopyRates, shared_links
from ...schedulers.hardware import same_gpu
from ...schedulers.placement import Gpu, NodeState, Option, Question, Rules, RunningJob, WaitingJob
from ..admission import Admission
from ..store import Job, Node
from .desk import MOVING, RESUMING, SPILLING, Desk
from .usage import used_gpu_s

_S = JobState
_OPTION_FIELDS = {field.name for field in fields(Option)}


@dataclass(frozen=True)
class Table:
    """Jobs at the table, by id."""

    waiting: Mapping[str, Job]
    running: Mapping[str, Job]
    """Jobs that hold something of a node; a paused one only holds memory."""
    plans: Mapping[str, Admission]
    nodes: Mapping[str, Node]
    unmet: Mapping[str, set[str]]
    """Jobs that each waiting one comes after and that have not succeeded yet."""


def question(desk: Desk, table: Table) -> Question:
    """The question for now."""
    taken: dict[str, set[str]] = {}
    for job in table.running.values():
        taken.setdefault(job.node or "", set()).update([job.gpu] if job.gpu else [])
    nodes = tuple(_node(node, taken.get(name)) for name, node in table.nodes.items() if node.alive or name in taken)
    return Question(
        now_s=desk.clock(),
        waiting=tuple(_waiting(job, table) for job in table.waiting.values()),
        running=tuple(_running(desk, job, table) for job in table.running.values()),
        nodes=nodes,
        rules=_with_kinds(desk.config.rules, {node.kind for node in nodes}),
        used_gpu_s=used_gpu_s(desk),
    )


def fingerprint(asked: Question) -> Hashable:
    """What has to change for the answer to change, apart from time going by."""
    waiting = tuple((job.id, job.priority, job.after, job.nodes, len(job.options)) for job in asked.waiting)
    running = tuple((job.id, job.priority, job.node, job.gpu, job.stopping) for job in asked.running)
    return waiting, running, asked.nodes


# ---- jobs


def _waiting(job: Job, table: Table) -> WaitingJob:
    plan = table.plans[job.id]
    return WaitingJob(
        id=job.id,
        user=job.user,
        priority=job.priority,
        submitted_s=job.queued_at,
        options=_options(plan, _share_left(job, plan)),
        deadline_s=job.spec.get("queue", {}).get("deadline"),
        after=tuple(sorted(table.unmet[job.id])),
        nodes=tuple(name for name in table.nodes if name not in job.avoid) if job.avoid else (),
        limits=plan.limits,
    )


def _options(plan: Admission, share: float) -> tuple[Option, ...]:
    """One for each kind of node, with this share of the work left."""
    return tuple(_option(way.option, share) for way in plan.ways.values())


def _option(stored: Mapping[str, Any], share: float) -> Option:
    known = {name: value for name, value in stored.items() if name in _OPTION_FIELDS}
    return Option(**{**known, "work_tokens": known["work_tokens"] * share})


def _share_left(job: Job, plan: Admission) -> float:
    return max(0.0, 1.0 - int(job.outcome.get("step", 0)) / plan.steps)


def _running(desk: Desk, job: Job, table: Table) -> RunningJob:
    assert job.node is not None
    plan = table.plans[job.id]
    way = plan.way(table.nodes[job.node].kind, job.claim) or next(iter(plan.ways.values()))
    option = _option(way.option, 1.0)
    look = desk.notes.looks.get(job.claim or "")
    seconds_per_step = (look.step_s if look else 0.0) or (option.seconds - option.startup_s) / plan.steps
    left = max(0, plan.steps - (look.step if look else 0))
    started_s = job.updated_at if job.state is _S.STARTING else (job.started_at or job.updated_at)
    spills = job.state is _S.PAUSED and job.reason in (SPILLING, RESUMING)
    leaving = job.state in (_S.PAUSING, _S.STOPPING, _S.RECOVERING) or spills
    comes_back = job.state is _S.RUNNING or job.reason == MOVING
    return RunningJob(
        id=job.id,
        user=job.user,
        priority=job.priority,
        node=job.node,
        gpu=job.gpu,
        option=option,
        started_s=started_s,
        waited_s=max(0.0, started_s - job.queued_at),
        remaining_s=_remaining_s(desk, job, leaving, left * seconds_per_step),
        preemptible=job.state in (_S.RUNNING, _S.PAUSED) and not leaving,
        stopping=leaving,
        moves=_options(plan, left / plan.steps) if comes_back else (),
    )


def _remaining_s(desk: Desk, job: Job, leaving: bool, work_s: float) -> float:
    if leaving:
        return desk.config.stop_timeout_s
    return math.inf if job.state is _S.PAUSED else work_s


# ---- nodes and rules


def _node(node: Node, taken: set[str] | None) -> NodeState:
    """``taken`` are the GPUs on which jobs run: one that the node does not name any more is there until they end.
    None where no job has anything of the node."""
    profile = node.profile
    h2d, d2h = float(profile.get("h2d_bytes_s", 0.0)), float(profile.get("d2h_bytes_s", 0.0))
    copies = [CopyRates.model_validate(each) for each in profile.get("copies", ())]
    links = shared_links(copies, h2d_bytes_s=h2d, d2h_bytes_s=d2h)
    return NodeState(
        name=node.name,
        kind=node.kind,
        gpus=_gpus(node, taken or set()),
        host_bytes=int(profile.get("host_memory_bytes", 0)),
        nvme_bytes=int(profile.get("nvme_bytes", 0)),
        dram_bytes_s=max(float(profile.get("host_bytes_s", 0.0)), links.both_bytes_s if copies else 0.0),
        pcie_bytes_s=links.root_bytes_s,
        h2d_bytes_s=links.h2d_bytes_s,
        d2h_bytes_s=links.d2h_bytes_s,
        copies_bytes_s=links.both_bytes_s,
        nvme_read_bytes_s=float(profile.get("nvme_read_bytes_s", 0.0)),
        nvme_write_bytes_s=float(profile.get("nvme_write_bytes_s", 0.0)),
        drained=node.drained,
        excluded=_excluded(node, idle=taken is None),
    )


def _gpus(node: Node, taken: set[str]) -> tuple[Gpu, ...]:
    """By the identity that the driver gives them; by number where there is no driver, because they are emulated."""
    count = int(node.gpus)
    devices = [*node.devices[:count]] or [{"id": str(index)} for index in range(count)]
    unlisted = taken - {device["id"] for device in devices}
    listed = [
        # A job that began before the driver was asked has its GPU by number.
        Gpu(
            id=device["id"],
            state="busy" if device.get("busy") or str(place) in unlisted else "free",
            pcie_root=device.get("pcie_root", ""),
        )
        for place, device in enumerate(devices)
    ]
    return (*listed, *(Gpu(id=name, state="busy") for name in sorted(unlisted)))


def _excluded(node: Node, *, idle: bool) -> str:
    """Why it takes no job. What was measured earlier and not in full has to do until it is idle."""
    if not node.alive:
        return "it is not there any more"
    if node.problem:
        return node.problem
    if node.measured or (node.profile and not idle):
        return ""
    busy = next((device for device in node.devices if device.get("busy")), None)
    return f"it is not measured while GPU {busy['index']} is busy: {busy['busy']}" if busy else "it is being measured"


def _with_kinds(rules: Rules, kinds: Iterable[str]) -> Rules:
    """The rules with quotas by the names that the nodes have for their GPUs, whatever name the lab wrote."""
    quota = {
        user: {kind: most for kind in kinds for name, most in limits.items() if same_gpu(name, kind)}
        for user, limits in rules.quota.items()
    }
    return replace(rules, quota=quota)
