"""What placement answers: starts, preemptions, and for every other job why it waits and until about when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .question import Option


class WaitCode(str, Enum):
    """Why a job does not start now. Only the last two will not change by waiting."""

    GPU_BUSY = "gpu_busy"
    """Every GPU that could hold it is taken."""
    HOST_MEMORY = "host_memory"
    """A GPU is free, but the jobs beside it leave too little host memory."""
    NVME_SPACE = "nvme_space"
    """A GPU is free, but the jobs beside it leave too little NVMe."""
    RESERVED = "reserved"
    """A GPU is free, but held for a job that has waited longer or has a higher priority."""
    BETTER_LATER = "better_later"
    """A GPU is free, but the job ends sooner by waiting for another one."""
    CROWDED = "crowded"
    """A GPU is free, but the jobs beside it use all of the node's bandwidth."""
    TURN = "turn"
    """Others go first to what is free."""
    QUOTA = "quota"
    """Its user has all the GPUs of that kind that one may have."""
    DEPENDENCY = "dependency"
    """Another job must end first."""
    PREEMPTING = "preempting"
    """A running job was told to make room for it."""
    CLOSED = "closed"
    """The nodes that could hold it are drained, excluded, or their GPUs bad."""
    NO_NODE = "no_node"
    """No node of a kind that could hold it is there; one may join."""
    TOO_LARGE = "too_large"
    """Nodes of its kinds are there, but all of them are too small even when idle."""
    NO_PLAN = "no_plan"
    """No plan fits on any kind of node: nothing to wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start ``job`` now."""

    job: str
    node: str
    gpu: str
    option: Option
    end_s: float
    """When it is expected to end, beside the jobs that share the node."""
    speed: float
    """Share of ``option.tokens_per_s`` that it is expected to reach beside them; 1 means that nothing is short."""
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """Tell the running ``job`` to save its state and return to the queue, because ``for_job`` shall run in its place.

    Where both are the same job it moves: a faster GPU is kept free until it is back in the queue and starts there.
    """

    job: str
    for_job: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """``job`` stays in the queue."""

    job: str
    code: WaitCode
    words: str
    """For the person who submitted it."""
    start_s: float | None = None
    """When it is expected to start; None if that cannot be said."""
    end_s: float | None = None
    node: str | None = None
    """Where it is expected to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """How the starts were found."""

    status: str
    """``OPTIMAL`` is proven, ``FEASIBLE`` the best that was known when time ran out, ``FALLBACK`` the greedy rule
    because the solver had nothing by then, ``NOTHING`` that there was nothing to decide."""
    objective: float
    """Worth of the starts: weighted share of its run time that each job ends sooner, less what co-location costs."""
    seconds: float
    """Wall-clock time of the whole decision; no decision depends on it unless the status is not ``OPTIMAL``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The answer to one question: each waiting job is in exactly one of ``starts`` and ``waits``."""

    starts: tuple[Start, ...]
    preempts: tuple[Preempt, ...]
    waits: tuple[Wait, ...]
    """In the order in which the jobs are expected to start."""
    running_end_s: dict[str, float]
    """When each running job is expected to end, by id."""
    solver: SolverReport
    crowded: frozenset[str] = frozenset()
    """Nodes where jobs start whose links are asked for more than they have: plans made for what each gets do better."""
