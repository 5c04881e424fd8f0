"""What a running job measured: how far off its prediction was, and what a new plan would gain where rates drifted.

A training loop records a few steps, `Measured.of` turns them into rates, `Calibration` says how far off the profile was
and is when it is fitted to them, and `replan` plans on the fitted one. The loop switches at the end of a step, where no
operation is in flight: weights, states and gradients are the host's, and no policy says otherwise, so nothing is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
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
        """Compare the work of each stream in measured steps of ``policy`` with what the profile promises for it.

        An operation that was not recorded does not count: an update may have run before its step began.
        """
        program = lower(policy, facts)
        promised = dict(zip(program.index, program_seconds(program, facts, profile), strict=True))
        promised_s: dict[str, float] = defaultdict(float)
        taken_s: dict[str, float] = defaultdict(float)
        for timeline in timelines:
            for span in timeline.spans:
                if span.op in promised:
                    promised_s[span.stream] += promised[span.op]
                    taken_s[span.stream] += span.end_s - span.start_s
        streams = (stream for stream, second in promised_s.items() if second > 0 and taken_s[stream] > 0)
        speeds = {stream: promised_s[stream] / taken_s[stream] for stream in streams}
        return cls(speeds, computed(timelines, program, facts, profile))

    def drifted(self, beyond: float = DRIFT) -> dict[str, float]:
        """The streams that are further from the profile than a share."""
        return {stream: speed for stream, speed in self.speeds.items() if abs(speed - 1) > beyond}

    def calibrated(self, planned: HardwareProfile) -> HardwareProfile:
        """The profile with all that was measured: the rate of every stream, and what compute takes in detail.

        Steps of a policy with layers that keep nothing, products, and everything say the most.
        """
        speeds = self.speeds
        changes: dict[str, Any] = {
            rate: getattr(planned, rate) * speeds[stream] for stream, rate in LINK_RATES.items() if stream in speeds
        }
        if "cpu" in speeds:
            changes["update_parameters_s"] = planned.update_parameters_s * speeds["cpu"]
            changes["host_bytes_s"] = planned.host_bytes_s * speeds["cpu"]
        if "compute" in speeds and self.compute is None:
            changes |= planned.faster(speeds["compute"])
            changes["operation_overhead_s"] = planned.operation_overhead_s / speeds["compute"]
        rates = planned.model_copy(update=changes)
        return rates if self.compute is None else self.compute.of(rates, planned)


@dataclass(frozen=True)
class Calibration:
    """How long measured steps took, and what is predicted of them before and after the profile is fitted to them."""

    steps: int
    measured_s: float
    """Their median."""
    predicted_s: float
    """What was predicted when the policy was planned."""
    calibrated_s: float
    """What is predicted by the profile that was fitted to them."""

    @classmethod
    def of(
        cls, timelines: Sequence[Timeline], policy: Policy, facts: ModelFacts, calibrated: HardwareProfile
    ) -> Calibration | None:
        """That of measured steps of ``policy``; None for a policy of which nothing was predicted."""
        if policy.predicted is None:
            return None
        measured_s = median(timeline.step_s for timeline in timelines)
        return cls(len(timelines), measured_s, policy.predicted.step_s, simulate(policy, facts, calibrated).step_s)

    @property
    def words(self) -> str:
        """How far off the prediction was and is."""
        before, after = (_off(self.measured_s, expected) for expected in (self.predicted_s, self.calibrated_s))
        return (
            f"a step takes {self.measured_s:.4g} s, {before} than was predicted, and {after} than is predicted by the "
            f"rates of {self.steps} measured steps"
        )


def _off(measured_s: float, expected_s: float) -> str:
    share = measured_s / expected_s - 1
    return f"{abs(share):.1%} {'less' if share < 0 else 'more'}"


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
    now = measured.calibrated(profile)
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
