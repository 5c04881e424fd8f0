"""Which nodes there are, and whether what we are about to ask for can ever be given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray

from ...jobs.errors import HardwareError
from .local import KIND_LABEL, label_value
from .port import Node


def list_nodes() -> list[Node]:
    """The nodes that Ray sees alive."""
    return [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            kind=node["Labels"].get(KIND_LABEL, ""),
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def selector(kind: str) -> dict[str, str] | None:
    """Ray's label selector for nodes with this kind of GPU; None for any node."""
    return {KIND_LABEL: label_value(kind)} if kind else None


def require(nodes: Sequence[Node], wanted: Mapping[str, float], kind: str = "") -> None:
    """Raise HardwareError when no node could give ``wanted`` even if it were idle: Ray would wait for ever."""
    cpus, gpus = wanted.get("CPU", 0.0), wanted.get("GPU", 0.0)
    label = label_value(kind)
    for node in nodes:
        if (not kind or node.kind == label) and node.cpus >= cpus and node.gpus >= gpus:
            return
    have = "; ".join(f"{n.address}: {n.kind or 'no GPU'}, {n.gpus:g} GPUs, {n.cpus:g} CPUs" for n in nodes) or "none"
    raise HardwareError(
        f"no node of the cluster has {gpus:g} GPU{'' if gpus == 1 else 's'} {kind} and {cpus:g} CPUs",
        hint=f"nodes that are alive: {have}",
    )
