"""Which machines are there, and what they can do."""

from __future__ import annotations

from ...jobs.errors import LazytrainError, Unreachable
from ..store import Node
from .desk import ACTIVE, Desk


def look_at_nodes(desk: Desk) -> None:
    """Record who is there, and measure whom nobody has measured yet."""
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
    busy = {job.node for job in desk.store.jobs.list(states=ACTIVE)}
    for node in desk.store.nodes.list():
        if node.alive and node.gpus and not node.profile and not node.drained and node.name not in busy:
            _measure(desk, node)


def _measure(desk: Desk, node: Node) -> None:
    try:
        profile = desk.runner.measure(node.name)
    except Unreachable:
        raise
    except LazytrainError as error:
        desk.store.nodes.drain(node.name, True, f"it could not be measured: {error.message}")
        return
    if profile is not None:
        desk.store.nodes.set_profile(node.name, profile)
