"""What planning is asked about a job, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from ...jobs.errors import LazytrainError
from ...jobs.frozen import Frozen

STAGE = "plan"
"""Stage of a job under which the store keeps its `Admission`."""

_WORTH_S: Final = 300.0
"""A run that ends sooner is not planned again."""


class Way(Frozen):
    """How a job can run on one kind of node."""

    option: dict[str, Any]
    """Fields of `schedulers.placement.Option`."""
    policy: dict[str, Any]
    device: dict[str, Any]
    """As in `RunOrder`."""


class Beside(Frozen):
    """How a job runs beside others on a node whose links all of them share."""

    claim: str
    """The run for which this was planned; any other run goes by the plan for a node of its own."""
    way: Way


class Admission(Frozen):
    """What planning found out about a job."""

    batch: int
    """Rows of one optimizer step, wherever it runs: what is learned does not depend on the node."""
    steps: int
    ways: dict[str, Way]
    """By kind of node; empty when it fits nowhere."""
    limits: dict[str, str]
    """By kind of node, why it does not fit there."""
    reasons: tuple[dict[str, Any], ...] = ()
    """When it fits nowhere: the planner's reasons, as ``plan --json`` has them."""
    notes: tuple[str, ...] = ()
    """What the person should know, for example how many rows were refused."""
    beside: Beside | None = None
    """The plan that was made together with those of its neighbours, of the run that has or had such a plan last."""

    def way(self, kind: str, claim: str | None) -> Way | None:
        """How the run with this claim goes on this kind of node."""
        if self.beside is not None and self.beside.claim == claim:
            return self.beside.way
        return self.ways.get(kind)


@dataclass(frozen=True, kw_only=True)
class AdmissionOrder:
    """A job to plan, and the machines to plan it for."""

    job: str
    spec: Mapping[str, Any]
    profiles: Mapping[str, Mapping[str, Any]]
    """Fields of `HardwareProfile` by kind of node."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """How many GPUs share the memory of a node, by kind; 1 where it is not given."""
    cache: str
    """Directory for tokenized rows."""
    memory_share: float = 1.0
    """Part of each memory that may be planned with: less after a run was out of memory."""
    batch: int | None = None
    """The batch that was fixed by an earlier admission."""
    priority: int = 0
    """Orders of higher priority are planned first."""
    user: str = ""
    """Whose job it is: users take turns."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Something else that only the planning process can answer."""

    job: str
    """Name of the question."""
    kind: str
    """``shape``, ``timeline``, ``together`` or ``drift``, see `questions`, `together` and `drift`."""
    values: Mapping[str, Any]
    priority: int = 1 << 30
    """Before all jobs: somebody looks at a page and waits, or a job does for which there is a place."""


def ends_soon(steps_left: float, step_s: float) -> bool:
    """Whether a run is not worth another plan."""
    return steps_left * step_s < _WORTH_S


class Answer(Frozen):
    """The answer to a `Question`, as JSON values."""

    values: dict[str, Any]


Found: TypeAlias = "Admission | Answer | LazytrainError"


class Planner(Protocol):
    """Plans jobs, one after the other, while the controller does something else."""

    def submit(self, order: AdmissionOrder | Question) -> None:
        """Plan this job some time; a job that is planned already is not planned twice."""

    def results(self) -> dict[str, Found]:
        """What has been found since the last call, by job."""

    def close(self) -> None:
        """Stop planning."""
