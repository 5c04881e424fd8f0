"""An object on a node that trains, for a process that lacks what the object needs, torch most of all."""

from __future__ import annotations

import logging
import threading
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...jobs.errors import LazytrainError, Unreachable
from ..settings import Settings
from .local import KIND_LABEL, Connection

log = logging.getLogger(__name__)

_IDLE_S = 60.0
"""After this long without a question the object is given up: its node wants the memory for training."""
_TRIES = 3


class Elsewhere:
    """Asks an object of class ``kind``, made with ``arguments`` in an actor that takes neither GPU nor cores.

    It is made at the first question, and again, on another node if there is one, when it has died. ``kind`` must be
    importable there.
    """

    def __init__(self, settings: Settings, address: str, kind: type, *arguments: Any) -> None:
        self._settings, self._address = settings, address
        self._kind, self._arguments = kind, arguments
        self._connection: Connection | None = None
        self._actor: Any = None
        self._node = ""
        self._asking = threading.Lock()
        self._idle: threading.Timer | None = None

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The method's answer, or our own error that it raised. Raises Unreachable when no node can be asked."""
        with self._asking:
            if self._idle is not None:
                self._idle.cancel()
            try:
                return self._ask(method, arguments, options)
            finally:
                self._idle = threading.Timer(_IDLE_S, self.release)
                self._idle.daemon = True
                self._idle.start()

    def release(self) -> None:
        """Give the object up; the next question makes another."""
        with self._asking:
            if self._actor is not None:
                ray.kill(self._actor)
                self._actor = None

    def _ask(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        died: list[str] = []
        while True:
            if self._actor is None:
                self._make(died)
            try:
                return ray.get(getattr(self._actor, method).remote(*arguments, **options))
            except ray.exceptions.RayTaskError as error:
                raise _ours(error, method, self._node) from error
            except ray.exceptions.RayError as error:
                log.warning("node %s was asked and did not answer: %s", self._node, error)
                died.append(self._node)
                self._actor = None

    def _make(self, died: list[str]) -> None:
        """On a node where it has not died, if there is one."""
        nodes = sorted(self._nodes(), key=died.count)
        if not nodes or len(died) == _TRIES:
            raise Unreachable(
                "no node that trains is there to be asked about model and rows",
                hint="lazytrain nodes shows which have joined and what is wrong with them",
            )
        self._node = nodes[0]
        where = NodeAffinitySchedulingStrategy(self._node, soft=False)
        remote = ray.remote(num_cpus=0, num_gpus=0, max_restarts=0, scheduling_strategy=where)(self._kind)
        self._actor = remote.remote(*self._arguments)

    def _nodes(self) -> list[str]:
        """Ids of the nodes with GPUs of a known kind: those have what training needs."""
        if self._connection is None:
            self._connection = Connection(self._settings, self._address)
        try:
            listed = ray.nodes()
        except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            self._connection.close()
            self._connection = None
            raise Unreachable(f"Ray does not answer at {self._address}: {error}") from error
        return sorted(node["NodeID"] for node in listed if node["Alive"] and KIND_LABEL in node["Labels"])


def _ours(error: ray.exceptions.RayTaskError, method: str, node: str) -> LazytrainError:
    if isinstance(error.cause, LazytrainError):
        return error.cause
    first = (str(error.cause).splitlines() or [""])[0]
    return LazytrainError(f"{method} failed on node {node}: {type(error.cause).__name__}: {first}")
