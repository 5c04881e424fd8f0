"""What planning answers: a plan, or the reasons for which there is none."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ...jobs.frozen import Frozen
from ...jobs.policy import Policy, Predicted


class Solver(Frozen):
    """How the plan was found."""

    planner: str
    backend: str = ""
    status: str = ""
    """``OPTIMAL`` is proven, ``FEASIBLE`` is what there was when time ran out (see ``gap``), ``FALLBACK`` is a rule
    used because time ran out with nothing, ``RULE`` a rule that was asked for."""
    objective_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    out_of_time: bool = False
    """Whether the clock ended the search, and not the work that it may do: another run may then answer differently."""
    seconds: float = 0.0
    """Wall-clock time in the solver."""
    cpu_seconds: float = 0.0
    """What of it this process computed: on a machine that others use too, the figure that says how much work it was."""


class Reason(Frozen):
    """A resource that is short."""

    resource: str
    """``gpu_memory``, ``host_memory`` or ``nvme``."""
    needed_bytes: int
    available_bytes: int
    shortfall_bytes: int
    hint: str


class Change(Frozen):
    """Something that would make it fit; it was planned with, so it does."""

    what: Literal["gpu_memory", "host_memory", "nvme", "memory", "batch", "master"]
    words: str
    step_s: float
    """Step time of a plan with the change, not searched for long."""
    tokens_per_s: float


class Plan(Frozen):
    """The answer to one question; ``policy``, ``predicted`` and ``solver`` are there when it is feasible."""

    feasible: bool
    policy: Policy | None = None
    predicted: Predicted | None = None
    solver: Solver | None = None
    reasons: tuple[Reason, ...] = ()
    changes: tuple[Change, ...] = ()
    """What would make it fit, the cheapest first: settings before hardware."""
    baselines: dict[str, Predicted] = Field(default_factory=dict)
    """What the fixed rules that fit would take."""
    notes: tuple[str, ...] = ()
    """What a person should know of the model at this shape."""

    def to_dict(self) -> dict[str, Any]:
        """The answer as ``lazytrain plan --json`` prints it."""
        if not self.feasible:
            return {
                "feasible": False,
                "reasons": [reason.model_dump(mode="json") for reason in self.reasons],
                "changes": [change.model_dump(mode="json") for change in self.changes],
            }
        dumped = self.model_dump(mode="json", by_alias=True)
        return {key: dumped[key] for key in ("feasible", "solver", "policy", "predicted", "baselines", "notes")}
