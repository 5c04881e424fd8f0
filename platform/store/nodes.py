"""Machines of the cluster, with what was measured on them and whether they take jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import select, update

from ...jobs.errors import NotFound
from .database import Database
from .records import Node
from .tables import NodeRow

_SEEN_EVERY_S = 5.0
_SEEN = ("address", "kind", "device", "cpus", "gpus")


class NodeStore:
    """Nodes in a database."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def see(self, nodes: Iterable[Node], now: float) -> Sequence[str]:
        """Record which nodes are alive; names of those that were and are no more.

        A profile is dropped when the node came back with other hardware. Nothing is written while nothing changes,
        but that they were seen, every few seconds.
        """
        alive = {node.name: node for node in nodes}
        if self._up_to_date(alive, now):
            return []
        with self._db.write() as session:
            rows = {row.name: row for row in session.scalars(select(NodeRow))}
            for name, node in alive.items():
                row = rows.get(name)
                if row is None:
                    row = NodeRow(name=name, profile={}, checked={}, devices=[], drained=False, reason="", faults=0)
                    session.add(row)
                elif any(getattr(row, field) != getattr(node, field) for field in ("kind", "device", "cpus", "gpus")):
                    row.profile = {}
                for field in _SEEN:
                    setattr(row, field, getattr(node, field))
                row.alive, row.seen_at = True, now
            lost = [row for name, row in rows.items() if row.alive and name not in alive]
            for row in lost:
                row.alive = False
            return [row.name for row in lost]

    def _up_to_date(self, alive: Mapping[str, Node], now: float) -> bool:
        known = {node.name: node for node in self.list() if node.alive}
        return known.keys() == alive.keys() and all(
            now - known[name].seen_at < _SEEN_EVERY_S
            and all(getattr(known[name], field) == getattr(node, field) for field in _SEEN)
            for name, node in alive.items()
        )

    def list(self) -> Sequence[Node]:
        """All nodes that were ever seen, by name."""
        with self._db.read() as session:
            return [_node(row) for row in session.scalars(select(NodeRow).order_by(NodeRow.name))]

    def get(self, name: str) -> Node:
        """The node. Raises NotFound."""
        with self._db.read() as session:
            row = session.get(NodeRow, name)
            if row is None:
                raise NotFound(f"there is no node {name}", hint="lazytrain nodes lists them")
            return _node(row)

    def set_profile(self, name: str, profile: Mapping[str, Any]) -> None:
        """Keep what was measured."""
        self._update(name, profile=dict(profile))

    def set_check(
        self, name: str, problem: str, checked: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]
    ) -> None:
        """Keep what the node said of itself, and what is wrong with it."""
        self._update(name, problem=problem, checked=dict(checked), devices=[dict(device) for device in devices])

    def drain(self, name: str, drained: bool, reason: str = "") -> None:
        """Give the node no new jobs, or take it back into service, which also clears its faults."""
        changes: dict[str, Any] = {"drained": drained, "reason": reason}
        if not drained:
            changes["faults"] = 0
        self._update(name, **changes)

    def add_fault(self, name: str) -> int:
        """Count a GPU or disk fault; how many there are now."""
        with self._db.write() as session:
            row = session.get(NodeRow, name)
            if row is None:
                raise NotFound(f"there is no node {name}")
            row.faults += 1
            return row.faults

    def _update(self, name: str, **changes: Any) -> None:
        with self._db.write() as session:
            done = session.execute(update(NodeRow).where(NodeRow.name == name).values(**changes))
            if done.rowcount != 1:  # type: ignore[attr-defined]
                raise NotFound(f"there is no node {name}", hint="lazytrain nodes lists them")


def _node(row: NodeRow) -> Node:
    return Node(**{column.name: getattr(row, column.name) for column in NodeRow.__table__.columns})
