"""What every node of a cluster says of itself, side by side: versions, clock, GPUs, the shared folder."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .local import KIND_LABEL, NAME_LABEL

_WAIT_S = 60.0
_PACKAGES = ("ray", "torch", "transformers", "lazytrain")


@dataclass(frozen=True)
class NodeReport:
    """One node's answers. Times are seconds; ``skew_s`` is its clock minus ours, right within ``uncertainty_s``."""

    name: str
    kind: str
    gpus: int
    versions: dict[str, str]
    skew_s: float
    uncertainty_s: float
    sees_folder: bool
    error: str = ""


def survey(folder: Path) -> list[NodeReport]:
    """Ask every node that is alive, whether or not it is busy; it needs a connection to Ray.

    Every node has to see the file that is left in ``folder`` for it.
    """
    mark = folder / f".survey-{os.getpid()}"
    mark.write_text("seen by every node?\n", encoding="utf-8")
    try:
        return [_ask(node, mark) for node in ray.nodes() if node["Alive"]]
    finally:
        mark.unlink(missing_ok=True)


def _ask(node: dict[str, Any], mark: Path) -> NodeReport:
    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    actor = ray.remote(num_cpus=0, num_gpus=0, scheduling_strategy=strategy)(Witness).remote()
    labels, gpus = node["Labels"], int(node["Resources"].get("GPU", 0))
    known = (labels.get(NAME_LABEL) or node["NodeID"][:12], labels.get(KIND_LABEL, ""), gpus)
    try:
        versions, sees = ray.get(actor.answer.remote(str(mark), _PACKAGES), timeout=_WAIT_S)
        skew, uncertainty = _skew(actor)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        return NodeReport(*known, {}, 0.0, 0.0, sees_folder=False, error=said[0])
    finally:
        ray.kill(actor)
    return NodeReport(*known, versions, skew, uncertainty, sees)


def _skew(actor: Any, asked: int = 5) -> tuple[float, float]:
    """The node's clock minus ours, from the quickest of several answers (Cristian's algorithm)."""
    found = []
    for _ in range(asked):
        before = time.time()
        there = ray.get(actor.now.remote(), timeout=_WAIT_S)
        after = time.time()
        found.append(((after - before) / 2, there - (before + after) / 2))
    uncertainty, skew = min(found)
    return skew, uncertainty


class Witness:
    """An actor on the node that is asked."""

    def answer(self, mark: str, packages: Sequence[str]) -> tuple[dict[str, str], bool]:
        """Versions of Python and packages (empty where there is none), and whether the file is there."""
        versions = {"python": platform.python_version()}
        for name in packages:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = ""
        return versions, Path(mark).exists()

    def now(self) -> float:
        """This node's clock."""
        return time.time()
