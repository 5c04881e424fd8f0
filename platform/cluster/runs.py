"""What the controller asks of the machines that train: start a job's attempt, look at it, end it.

A run is one attempt of a job; its ``claim`` is its name everywhere. It goes on when whoever started it is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field

from ...jobs.frozen import Frozen

HOST_LOST = "host_lost"
"""Code of the outcome of a run that was ended because the process that held its GPU was gone."""


@dataclass(frozen=True, kw_only=True)
class RunOrder:
    """Everything that a run needs; JSON values, because it travels as a file in the job's directory."""

    job: str
    claim: str
    attempt: int
    spec: Mapping[str, Any]
    """The resolved job file."""
    policy: Mapping[str, Any]
    device: Mapping[str, Any]
    """``{"kind": "cuda"}``, ``{"kind": "cpu"}``, or ``{"kind": "emulated", ...}`` with the fields of `Emulated`."""
    run_dir: Path
    node: str
    gpu: str
    cpus: float
    """Cores that it may keep busy."""
    host_bytes: int = 0
    """Host memory above which it is ended; 0 sets no limit."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """``profile``, ``kind`` and ``memory_share`` of the node, where the batch is to be searched first; else empty."""
    tracking: Mapping[str, Any] = field(default_factory=dict)
    """MLflow ``uri``, ``experiment``, ``run_name``, ``params``, ``tags``; empty without MLflow."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**vars(self), "run_dir": str(self.run_dir)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunOrder:
        """What `to_dict` gave."""
        return cls(**{**values, "run_dir": Path(values["run_dir"])})


class Phase(str, Enum):
    """How far a run is."""

    ABSENT = "absent"
    """It was never started, or nothing tells that it was."""
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    """Its process waits, with everything in host memory; it holds no GPU."""
    ENDED = "ended"
    """Nothing of it lives any more, and it left word how it ended."""
    LOST = "lost"
    """Nothing of it can be reached, and it left no word."""


class Outcome(Frozen):
    """How a run ended."""

    how: str
    """``done``, ``stopped`` (asked to, state saved), ``error`` (it said which), ``died`` (it said nothing)."""
    code: str = ""
    """Code of the error, as in `jobs.errors`."""
    message: str = ""
    hint: str = ""
    final: bool = False
    """Whether the error would be the same the next time: something about the job has to change first."""
    exit_code: int | None = None
    signal: int | None = None
    step: int = 0
    loss: float | None = None
    node: str = ""
    result: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """The result record of a run that is done."""


_Count = Annotated[int, Field(ge=0, lt=2**53)]


class Beat(Frozen):
    """A sign of life of a training process."""

    beat: _Count = 0
    step: _Count = 0
    total_steps: _Count = 0
    step_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    paused: bool = False
    doing: str = ""


@dataclass(frozen=True)
class Look:
    """What can be seen of a run."""

    phase: Phase
    beat: int = 0
    """Grows while the training process lives."""
    step: int = 0
    total_steps: int = 0
    step_s: float = 0.0
    """Seconds of a step, lately."""
    outcome: Outcome | None = None
    """Of a run that has ended."""
    doing: str = ""
    """What it does before it trains, for people; empty once it does."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine that is there now."""

    name: str
    address: str
    kind: str
    """Kind of its GPUs, as job files name it; ``cpu`` without one."""
    device: str
    """``cuda``, ``emulated`` or ``cpu``."""
    cpus: float
    gpus: int


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a machine says of itself."""

    versions: Mapping[str, str]
    token: str = ""
    """What it read in the file that only the head writes; empty where it does not see the head's folder."""
    devices: tuple[Mapping[str, Any], ...] = ()
    """Fields of `inspection.Device`, in the order in which its GPUs are counted."""


class Runner(Protocol):
    """Machines that train. No method waits for a training; one that cannot reach them raises Unreachable."""

    def machines(self) -> list[Machine]:
        """The machines that are there."""

    def inspect(self, machine: str, token_file: Path) -> NodeReport | None:
        """Ask a machine what is there; None while it has not answered."""

    def measure(self, machine: str) -> Mapping[str, Any] | None:
        """The profile of an idle machine; None while it is being measured. Raises LazytrainError when that failed."""

    def start(self, order: RunOrder) -> None:
        """Start a run. A claim that was started before is not started again."""

    def runs(self) -> set[str]:
        """Claims of all runs that are alive, whoever started them."""

    def look(self, claim: str, run_dir: Path, attempt: int) -> Look:
        """What can be seen of a run."""

    def stop(self, claim: str, run_dir: Path) -> None:
        """Ask a run to save and leave; said twice is said once. A paused one saves what it has in memory."""

    def pause(self, claim: str, run_dir: Path) -> None:
        """Ask a run to keep its state in host memory and give its GPU up after the step; said twice is said once."""

    def resume(self, claim: str, run_dir: Path) -> None:
        """Let a paused run take its GPU again; said twice is said once."""

    def switch(self, claim: str, run_dir: Path, policy: Mapping[str, Any]) -> None:
        """Have a run carry out another policy from the end of the step on."""

    def kill(self, claim: str) -> None:
        """End everything of a run now."""

    def close(self) -> None:
        """Let go of the machines; runs go on."""
