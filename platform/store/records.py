"""What the store hands out: plain values, free of any session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...jobs.lifecycle import JobState
from ...schedulers.hardware import MEASUREMENT


class Role(str, Enum):
    """What a user may do: look, also submit, also rule over everybody's jobs and the nodes."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    ADMIN = "admin"

    def includes(self, other: Role) -> bool:
        """Whether this role may do what ``other`` may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


class Action(str, Enum):
    """What can be asked of a job."""

    STOP = "stop"
    PAUSE = "pause"
    RESUME = "resume"
    SET = "set"
    REMOVE = "remove"


@dataclass(frozen=True)
class User:
    """Somebody who may use the service."""

    name: str
    role: Role
    created_at: float


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A job as it is submitted."""

    id: str
    user: str
    name: str
    spec: Mapping[str, Any]
    run_dir: str
    priority: int
    after: tuple[str, ...] = ()
    continues: str | None = None
    """Job from whose last checkpoint it goes on."""
    idempotency_key: str | None = None
    body_digest: str = ""
    sentence: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as it is stored."""

    id: str
    user: str
    name: str
    spec: Mapping[str, Any]
    run_dir: str
    state: JobState
    reason: str
    sentence: str
    priority: int
    after: tuple[str, ...]
    continues: str | None
    created_at: float
    updated_at: float
    queued_at: float
    """Since when its turn counts: its submission, or the end of a pause that somebody asked for."""
    started_at: float | None
    """When its last attempt began to train."""
    ended_at: float | None
    not_before: float
    """It is not started again before this time."""
    version: int
    """Grows with every change; a change names the version that it is based on."""
    attempt: int
    """How often it was started."""
    claim: str | None
    """Token of the attempt that runs; what another attempt reports does not count."""
    node: str | None
    """Where it runs or ran last."""
    gpu: str | None
    last_gpu: str | None
    """The GPU that a job had before it was paused in memory: it can only go on there."""
    infra_failures: int
    user_failures: int
    replans: int
    preemptions: int
    avoid: tuple[str, ...]
    """Nodes that it is not started on again."""
    outcome: Mapping[str, Any]
    """How the last attempt ended: exit code or signal, last step, figures, hint."""
    removed_at: float | None


@dataclass(frozen=True)
class Request:
    """What somebody asked of a job."""

    id: int
    job: str
    user: str
    action: Action
    argument: Mapping[str, Any]
    created_at: float


@dataclass(frozen=True)
class Event:
    """Something that happened to a job."""

    id: int
    job: str
    time: float
    kind: str
    state: str
    reason: str
    sentence: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """A job came into a state."""

    job: str
    user: str
    time: float
    state: JobState


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of the cluster, as it was last seen."""

    name: str
    address: str
    kind: str
    device: str
    cpus: float
    gpus: float
    alive: bool
    drained: bool = False
    reason: str = ""
    """Why it is drained or takes no job."""
    faults: int = 0
    """GPU or disk faults since somebody last cleared them."""
    seen_at: float = 0.0
    profile: Mapping[str, Any] = field(default_factory=dict)
    """Its measured profile; empty until it was measured."""
    problem: str = ""
    """What the check of the node has found wrong: it takes no job as long as that is so."""
    checked: Mapping[str, Any] = field(default_factory=dict)
    """What it said of itself: versions, whether it sees the shared folder; empty until it was checked."""
    devices: Sequence[Mapping[str, Any]] = ()
    """Its GPUs: ``id``, ``pcie_root``, ``driver``, and in ``busy`` what uses it from outside."""

    @property
    def measured(self) -> bool:
        """Whether its profile holds what is measured today, of the GPUs and with the driver that it has now."""
        if self.profile.get("measurement") != MEASUREMENT:
            return False
        known, listed = self.profile.get("copies", ()), self.devices[: int(self.gpus)]
        if not known or not listed:  # without links to measure, or without a driver to ask
            return True
        driver = self.profile.get("driver", "")
        same_driver = all(device.get("driver", driver) == driver for device in listed)
        return same_driver and {each["gpu"] for each in known} == {device["id"] for device in listed}


@dataclass(frozen=True)
class Lease:
    """The right to be the only one, until ``expires_at`` (Unix seconds)."""

    name: str
    owner: str
    epoch: int
    expires_at: float


@dataclass(frozen=True)
class AuditEntry:
    """A change that somebody asked for, and the HTTP status that answered it."""

    time: float
    user: str
    remote: str
    method: str
    path: str
    status: int
