"""When a running job's measured rates have drifted from its profile: what a new plan would gain.

A training loop reports what it measured in a step, `Measured.of` turns that into rates, and `replan` answers. The loop
switches at the end of a step, where no operation is in flight: weights, states and gradients are the host's, and no
policy says otherwise, so nothing is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..jobs.errors import DoesNotFit
from ..jobs.model_facts import ModelFacts
from ..jobs.policy import Policy, lower
from ..jobs.timeline import Timeline
from .calibration import Computed, computed
from .costs import LINK_RATES, program_seconds
from .hardware import HardwareProfile
from .planner import Plan, plan
from .simulator import simulate

DRIFT: Final = 0.15
"""Share by which a rate must differ from the profile's before anything is planned again."""
WORTH: Final = 0.02
"""Share of the step that a new policy must save to be worth a switch."""


@dataclass(frozen=True)
class Measured:
    """How fast each stream was in a step, relative to the profile: 0.5 is half as fast."""

    speeds: dict[str, float] = field(default_factory=dict)
    compute: Computed | None = None
    """What compute took in detail; None where no layer was seen."""

    @classmethod
    def of(cls, timelines: Sequence[Timeline], policy: Policy, facts: ModelFacts, profile: HardwareProfile) -> Measured:
        """Compare the work of each stream in measured steps of ``policy`` with what the profile promises."""
        program = lower(policy, facts)
        promised_s: dict[str, float] = defaultdict(float)
        for op, seconds in zip(program.ops, program_seconds(program, facts, profile), strict=True):
            promised_s[op.stream] += seconds * len(timelines)
        taken_s: dict[str, float] = defaultdict(float)
        for timeline in timelines:
            for stream, seconds in timeline.busy_s().items():
                taken_s[stream] += seconds
        streams = (stream for stream, second in promised_s.items() if second > 0 and taken_s[stream] > 0)
        speeds = {stream: promised_s[stream] / taken_s[stream] for stream in streams}
        return cls(speeds, computed(timelines, program, facts, profile))

    def drifted(self, beyond: float = DRIFT) -> dict[str, float]:
        """The streams that are further from the profile than a share."""
        return {stream: speed for stream, speed in self.speeds.items() if abs(speed - 1) > beyond}

    def profile(self, planned: HardwareProfile, *, beyond: float = DRIFT) -> HardwareProfile:
        """The profile with the rates that were measured, for the streams that are off by more than ``beyond``."""
        drifted = self.drifted(beyond)
        changes: dict[str, Any] = {
            rate: getattr(planned, rate) * drifted[stream] for stream, rate in LINK_RATES.items() if stream in drifted
        }
        if "cpu" in drifted:
            changes["update_parameters_s"] = planned.update_parameters_s * drifted["cpu"]
            changes["host_bytes_s"] = planned.host_bytes_s * drifted["cpu"]
        if "compute" in drifted:
            speed = drifted["compute"]
            changes |= planned.faster(speed)
            changes["operation_overhead_s"] = planned.operation_overhead_s / speed
        return planned.model_copy(update=changes)

    def calibrated(self, planned: HardwareProfile) -> HardwareProfile:
        """The profile with all that was measured: the rate of every stream, and what compute takes in detail.

        Steps of a policy with layers that keep nothing, products, and everything say the most.
        """
        rates = self.profile(planned, beyond=0.0)
        return rates if self.compute is None else self.compute.of(rates, planned)


@dataclass(frozen=True)
class Replan:
    """What to do: ``answer`` holds the new policy where a switch is worth it, None otherwise."""

    answer: Plan | None
    profile: HardwareProfile
    """The machine as it was measured."""
    old_step_s: float
    """What the running policy takes on it."""
    new_step_s: float
    words: str

    @property
    def gain(self) -> float:
        """Share of the step time that the new policy saves."""
        return 1 - self.new_step_s / self.old_step_s


def replan(
    policy: Policy, facts: ModelFacts, profile: HardwareProfile, measured: Measured, **options: Any
) -> Replan | None:
    """A policy for the rates that were measured, or None while none has drifted by more than `DRIFT`.

    ``options`` are those of `plan`. Raises ProgramError if the policy was made for other facts.
    """
    drifted = measured.drifted()
    if not drifted:
        return None
    now = measured.profile(profile)
    old_s = simulate(policy, facts, now).step_s
    seen = ", ".join(f"{stream} at {speed:.2f} of its planned rate" for stream, speed in sorted(drifted.items()))
    try:
        answer = plan(facts, now, accumulation=policy.accumulation, **options)
    except DoesNotFit:
        answer = Plan(feasible=False)
    new_s = answer.predicted.step_s if answer.predicted else old_s
    if new_s > old_s * (1 - WORTH):
        words = f"{seen}: no other policy saves {WORTH:.0%} of the {old_s:.4g} s that a step takes now"
        return Replan(None, now, old_s, min(old_s, new_s), words)
    words = f"{seen}: a new policy takes {new_s:.4g} s a step instead of {old_s:.4g} s, {1 - new_s / old_s:.1%} less"
    return Replan(answer, now, old_s, new_s, words)
