"""All states of a job, and the only moves between them."""

from __future__ import annotations

from enum import Enum


class JobState(str, Enum):
    """What a job is doing; the last four are final."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    RECOVERING = "RECOVERING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    REJECTED = "REJECTED"

    @property
    def final(self) -> bool:
        """Whether nothing can happen to the job any more."""
        return not TRANSITIONS[self]


_S = JobState
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    _S.QUEUED: frozenset({_S.STARTING, _S.STOPPED, _S.REJECTED}),
    _S.STARTING: frozenset({_S.RUNNING, _S.QUEUED, _S.STOPPING, _S.RECOVERING, _S.FAILED}),
    _S.RUNNING: frozenset({_S.PAUSING, _S.STOPPING, _S.RECOVERING, _S.SUCCEEDED, _S.FAILED}),
    _S.PAUSING: frozenset({_S.PAUSED, _S.STOPPING, _S.RECOVERING, _S.SUCCEEDED, _S.FAILED}),
    _S.PAUSED: frozenset({_S.QUEUED, _S.STARTING, _S.STOPPED, _S.STOPPING}),
    _S.STOPPING: frozenset({_S.STOPPED, _S.SUCCEEDED, _S.FAILED}),
    _S.RECOVERING: frozenset({_S.QUEUED, _S.STOPPING, _S.STOPPED, _S.FAILED}),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset(),
    _S.STOPPED: frozenset(),
    _S.REJECTED: frozenset(),
}


def may_become(now: JobState, then: JobState) -> bool:
    """Whether the move from ``now`` to ``then`` is legal."""
    return then in TRANSITIONS[now]
