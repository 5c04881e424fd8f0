"""Which machines are there, whether they can be used, and what they can do."""

from __future__ import annotations

import logging
from typing import Any

from ...jobs.errors import DeviceBusy, LazytrainError, Unreachable
from ..cluster.runs import NodeReport
from ..inspection import compare
from ..store import Node
from .desk import ON_NODES, Desk

log = logging.getLogger(__name__)


def look_at_nodes(desk: Desk) -> None:
    """Record who is there, check them, and measure whom nobody has measured as they are now."""
    desk.store.nodes.see(
        (
            Node(
                name=machine.name,
                address=machine.address,
                kind=machine.kind,
                device=machine.device,
                cpus=machine.cpus,
                gpus=float(machine.gpus),
                alive=True,
            )
            for machine in desk.runner.machines()
        ),
        desk.clock(),
    )
    for node in desk.store.nodes.list():
        if node.alive and node.gpus:
            _check(desk, node)
    busy = {job.node for job in desk.store.jobs.list(states=ON_NODES) if job.claim}
    for node in desk.store.nodes.list():
        usable = node.alive and node.gpus and node.checked and not node.problem and not node.drained
        in_use = node.name in busy or any(device.get("busy") for device in node.devices)
        if usable and not node.measured and not in_use:
            _measure(desk, node)


def _check(desk: Desk, node: Node) -> None:
    now, before = desk.steady(), desk.notes.inspected.get(node.name, float("-inf"))
    if node.checked and now - before < desk.config.inspect_every_s:
        return
    report = desk.runner.inspect(node.name, desk.config.token_file)
    if report is None:
        return
    desk.notes.inspected[node.name] = now
    found = findings(node, report, desk.config.head)
    if found != (node.problem, node.checked, [dict(device) for device in node.devices]):
        desk.store.nodes.set_check(node.name, *found)


def findings(node: Node, report: NodeReport, head: NodeReport) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """What is wrong with a node, what it said, and its GPUs."""
    software = compare(report.versions, head.versions)
    shared = report.token == head.token
    problems = [software.problem] if software.problem else []
    if not shared:
        problems.append("it does not see the head's folder: what jobs write there would not be found")
    if 0 < len(report.devices) < node.gpus and node.device == "cuda":  # none: the driver's tool is not there to ask
        problems.append(
            f"Ray counts {node.gpus:g} GPUs and the driver {len(report.devices)}: "
            f"start the node with --num-gpus {len(report.devices)}"
        )
    checked = {"versions": dict(report.versions), "shared_storage": shared, "warning": software.warning}
    return "; ".join(problems), checked, [dict(device) for device in report.devices]


def _measure(desk: Desk, node: Node) -> None:
    try:
        profile = desk.runner.measure(node.name)
    except Unreachable:
        raise
    except DeviceBusy as error:  # the next check of the node says who uses it; it is measured after that
        log.info("node %s: %s", node.name, error.message)
        return
    except LazytrainError as error:
        desk.store.nodes.drain(node.name, True, f"it could not be measured: {error.message}")
        return
    if profile is not None:
        desk.store.nodes.set_profile(node.name, profile)
