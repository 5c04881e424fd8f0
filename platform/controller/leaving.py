"""Letting a run save its state and leave, and how long that may take."""

from __future__ import annotations

import logging
from pathlib import Path

from ..store import Job
from .desk import Desk

log = logging.getLogger(__name__)

SLOW_DISK_BYTES_S = 100e6
"""A checkpoint is written at least this fast; all that a job holds on the host may go into it."""


def make_it_leave(desk: Desk, job: Job, claim: str) -> None:
    """Ask, and kill it when it has not left in time."""
    ask_to_leave(desk, job, claim)
    waited = desk.notes.waited(claim, "stop", desk.steady())
    if waited >= desk.config.stop_timeout_s and waited >= patience_s(desk, job):
        kill(desk, claim)


def ask_to_leave(desk: Desk, job: Job, claim: str) -> None:
    """Ask. A run that cannot hear it, because its folder is gone or full, is killed when its time is up."""
    try:
        desk.runner.stop(claim, Path(job.run_dir))
    except OSError as error:
        log.warning("job %s cannot be asked to leave: %s", job.id, error)


def patience_s(desk: Desk, job: Job) -> float:
    """Seconds that it may take to save and leave: large jobs need longer, and to kill them would lose their work."""
    plan = desk.plans([job]).get(job.id)
    ways = plan.ways.values() if plan is not None else ()
    host_bytes = max((float(way.option.get("host_bytes", 0)) for way in ways), default=0.0)
    return desk.config.stop_timeout_s + host_bytes / SLOW_DISK_BYTES_S


def kill(desk: Desk, claim: str) -> None:
    """End it now."""
    desk.notes.killed.add(claim)
    desk.runner.kill(claim)
