"""What the controller needs from outside, besides the store and the machines; tests give fakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ...schedulers.placement import Decisions, Question, Rules
from ..cluster.runs import NodeReport
from ..tracking import EXPERIMENT

Clock = Callable[[], float]
"""Unix seconds."""
Decide = Callable[[Question], Decisions]


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the controller runs; times are seconds."""

    lease_s: float = 10.0
    """Without a sign of life for this long, another controller takes over."""
    start_timeout_s: float = 180.0
    """From the start of a run to its first beat."""
    beat_timeout_s: float = 120.0
    """Without a beat for this long, a run that still exists is ended."""
    lost_grace_s: float = 10.0
    """How long a run that cannot be reached may take to leave word of its end."""
    stop_timeout_s: float = 60.0
    """How long a run that was asked to stop may take before it is killed."""
    pause_timeout_s: float = 300.0
    """How long a run may take to the end of its step and to give its GPU up; after that it saves and leaves."""
    inspect_every_s: float = 10.0
    """How often nodes are asked what uses their GPUs."""
    search_batch: bool = True
    """Whether a job that leaves its batch open measures it on its node first; else the planner's prediction holds."""
    search_from_s: float = 1800.0
    """Only a job that is expected to run for this long does: four probes may take minutes."""
    head: NodeReport = field(default_factory=lambda: NodeReport(versions={}))
    """What nodes must have: the head's versions, and the token in ``token_file``."""
    token_file: Path = Path("token")
    rules: Rules = field(default_factory=lambda: Rules(moving=True))
    usage_half_life_s: float = 24 * 3600.0
    """After this time, what a user had of the GPUs counts half for the fair share."""
    mlflow_uri: str = ""
    experiment: str = EXPERIMENT
    tell_lost: Callable[[str], None] = lambda run_dir: None
    """Has MLflow know that the run in a job's directory has died, whose job goes on later; must not wait for it."""
    close_tracking: Callable[[str], None] = lambda job: None
    """Lets the MLflow run of a job that has ended show how it ended; must not wait for it."""
