"""What placement is asked: who waits, what runs, what the nodes have, and the lab's rules. Plain values only.

Times are seconds on the clock of ``Question.now_s`` (the Unix epoch in production, any clock in a simulation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from ...jobs.errors import InputError

EVERYBODY: Final = "*"
"""In ``Rules.quota``: the quota of users without one of their own."""

GpuState = Literal["free", "busy", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What one job needs and reaches on one kind of node, by the planner's prediction for an otherwise idle node."""

    kind: str
    """Kind of GPU, as in ``NodeState.kind``."""
    tokens_per_s: float
    work_tokens: float
    """Tokens that are left to train."""
    host_bytes: int
    nvme_bytes: int = 0
    dram_bytes_s: float = 0.0
    """Host memory traffic while it trains at ``tokens_per_s``."""
    h2d_bytes_s: float = 0.0
    d2h_bytes_s: float = 0.0
    nvme_read_bytes_s: float = 0.0
    nvme_write_bytes_s: float = 0.0
    startup_s: float = 0.0
    """Seconds from the start until the first step: processes, loading the model."""

    def __post_init__(self) -> None:
        """Raises InputError for a speed that is not positive or an amount that is negative."""
        amounts = (self.work_tokens, self.host_bytes, self.nvme_bytes, self.dram_bytes_s, self.startup_s)
        rates = (self.h2d_bytes_s, self.d2h_bytes_s, self.nvme_read_bytes_s, self.nvme_write_bytes_s)
        if not (math.isfinite(self.tokens_per_s) and self.tokens_per_s > 0):
            raise InputError(f"an option on {self.kind} has a speed of {self.tokens_per_s} tokens/s")
        if any(not math.isfinite(amount) or amount < 0 for amount in (*amounts, *rates)):
            raise InputError(f"an option on {self.kind} has a negative or infinite demand")

    @property
    def seconds(self) -> float:
        """From start to end when it has the node's links to itself."""
        return self.startup_s + self.work_tokens / self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """A job that wants one GPU."""

    id: str
    user: str
    priority: int
    submitted_s: float
    """Since when it waits: its submission, or the end of its last run."""
    options: tuple[Option, ...]
    """One for each kind of node that can hold it at all; none means that no plan fits anywhere."""
    deadline_s: float | None = None
    after: tuple[str, ...] = ()
    """Jobs that must have succeeded before; those that the question does not list have."""
    nodes: tuple[str, ...] = ()
    """Names of the only nodes where it may run (its checkpoint or its files lie there); empty means any."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """By kind of GPU, why there is no option for it: the planner's words, used when the job's waiting is explained."""

    def option(self, kind: str) -> Option | None:
        """What it needs on that kind of node; None if it cannot run there."""
        return next((option for option in self.options if option.kind == kind), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job that holds resources of a node, from the moment of its start until everything of it is gone."""

    id: str
    user: str
    priority: int
    node: str
    gpu: str | None
    """Id of its GPU; None for a paused job, which only keeps host memory (and NVMe)."""
    option: Option
    started_s: float
    remaining_s: float
    """Expected seconds until it ends; never below 0, even when it takes longer than was predicted."""
    waited_s: float = 0.0
    """Seconds from its submission to its start."""
    preemptible: bool = True
    stopping: bool = False
    """Whether it was told to leave already; ``remaining_s`` is then the time that this takes."""
    moves: tuple[Option, ...] = ()
    """Its options with the work that is left, start-up included; used when the rules let jobs move. None for a job that
    was told to leave and shall not come back: a GPU would be kept for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a node."""

    id: str
    state: GpuState = "free"
    """``busy`` means used by something outside; a GPU under a running job of ours is busy whatever it says here."""
    pcie_root: str = ""
    """GPUs with the same root share its bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One machine: what jobs may use of it in all, whether or not they use it now."""

    name: str
    kind: str
    gpus: tuple[Gpu, ...]
    host_bytes: int
    nvme_bytes: int = 0
    dram_bytes_s: float = math.inf
    pcie_bytes_s: float = math.inf
    """Bandwidth of one PCIe root, in each direction."""
    h2d_bytes_s: float = math.inf
    """What all GPUs together bring from the host's memory; each of the three as measured while all of them copied."""
    d2h_bytes_s: float = math.inf
    copies_bytes_s: float = math.inf
    """The same of both directions together."""
    nvme_read_bytes_s: float = math.inf
    nvme_write_bytes_s: float = math.inf
    drained: bool = False
    """Runs what it runs, takes nothing new."""
    excluded: str = ""
    """Why it takes nothing new (repeated faults, a failed check); empty if it does."""

    @property
    def open(self) -> bool:
        """Whether jobs may start here."""
        return not self.drained and not self.excluded


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the lab wants its GPUs to be shared."""

    min_run_s: float = 1800.0
    """A job is never preempted before it has run for this long."""
    preempt_margin: int = 20
    """Only a job whose priority is higher by at least this many points preempts another."""
    ageing_s: float = 6 * 3600.0
    """A job that has waited this long counts twice, after twice this long three times, among those of its priority."""
    reserve_after_s: float = 24 * 3600.0
    """After this long a blocked job's GPU is held free for it, oldest job first, whatever its priority."""
    reserve_part: float = 0.25
    """Part of the GPUs of a kind, and of the memory that belongs to them, which jobs that waited so long may hold; once
    they do, the order is the usual one until one of them ends. Where more work arrives than the GPUs can do, every job
    waits for long in the end, and without a limit all would go by age."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Weight of a user among all users, 1 where it is not given."""
    quota: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Most GPUs at once, by user (``*``: everybody else) and kind of GPU."""
    moving: bool = False
    """Whether a job may start on a slower GPU that would be idle, and move once a faster one is (``RunningJob.moves``
    must be given then). It never moves before ``min_run_s``."""
    utc_offset_s: float = 0.0
    """Added to times before they are shown as time of day."""

    def __post_init__(self) -> None:
        """Raises InputError for a rule that makes no sense."""
        if min(self.min_run_s, self.reserve_after_s) < 0 or self.ageing_s <= 0:
            raise InputError("min_run_s and reserve_after_s are at least 0, ageing_s is above 0")
        if any(not (math.isfinite(share) and share > 0) for share in self.shares.values()):
            raise InputError(f"the shares of users are positive numbers, not {dict(self.shares)}")

    def share(self, user: str) -> float:
        """Weight of ``user``."""
        return self.shares.get(user, 1.0)

    def most_gpus(self, user: str, kind: str) -> float:
        """Most GPUs of ``kind`` that ``user`` may hold at once; infinity if there is no quota."""
        own = self.quota.get(user, self.quota.get(EVERYBODY, {}))
        return own.get(kind, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that a decision depends on: equal questions get equal decisions."""

    now_s: float
    waiting: tuple[WaitingJob, ...]
    running: tuple[RunningJob, ...]
    nodes: tuple[NodeState, ...]
    rules: Rules = field(default_factory=Rules)
    used_gpu_s: Mapping[str, float] = field(default_factory=dict)
    """GPU seconds that each user had lately (the caller lets them fade), for fair share."""

    def __post_init__(self) -> None:
        """Raises InputError for an id that is there twice, or a job on a node or a GPU that is not listed or taken."""
        ids = [job.id for job in self.waiting] + [job.id for job in self.running]
        _unique(ids, "job")
        _unique([node.name for node in self.nodes], "node")
        places = {(node.name, gpu.id) for node in self.nodes for gpu in node.gpus}
        taken = [(job.node, job.gpu) for job in self.running if job.gpu is not None]
        _unique([f"{node} {gpu}" for node, gpu in taken], "GPU with a running job")
        unknown = [place for place in taken if place not in places]
        if unknown:
            raise InputError(f"a job runs on GPU {unknown[0][1]} of {unknown[0][0]}, which is not among the nodes")


def _unique(names: list[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"the {what} {name} is listed twice")
        seen.add(name)
