"""What compute took in measured steps: a layer's forward, its backward by what was kept, and what no operation did.

The time of a compute operation is that of its arithmetic and an overhead. Arithmetic is fitted to the median of layers
and steps, so that a layer which something held up does not count. The overhead is all the rest, spread over the
operations: then what was fitted predicts, for the policy that was measured, the sum that was measured.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, Final

from ..jobs.model_facts import Internals, ModelFacts
from ..jobs.policy import Program
from ..jobs.timeline import Span, Timeline
from .costs import backward_forwards, forward_seconds, program_seconds
from .hardware import HardwareProfile

_REFORWARDS: Final[dict[Internals, str]] = {"matmuls": "reforward_matmuls", "all": "reforward_all"}
"""The field of the profile that says what a layer's backward takes beside its gradients."""
_LEAST: Final = 1e-3
"""Forwards that a backward takes at least, however odd what was measured."""


@dataclass(frozen=True)
class Computed:
    """What compute took, in terms of a profile's fields."""

    speed: float
    """How fast layers ran forward, relative to the profile."""
    forwards: dict[Internals, float]
    """Forwards' time that a layer's forward and backward took together, by what was kept between them."""
    share: float
    """Of ``backward_forwards``, what the measured layers have: less than 1 where weights are frozen."""
    program: Program
    facts: ModelFacts
    taken_s: float
    """Seconds of all compute operations of a step, with the time that compute was held up by nothing but the host."""

    def of(self, rates: HardwareProfile, planned: HardwareProfile) -> HardwareProfile:
        """``rates`` with compute as it was measured against ``planned``."""
        known = next(kept for kept in ("none", "all", "matmuls") if kept in self.forwards)
        gradients = max(self.forwards[known] - 1 - planned.reforward(known), _LEAST)
        changes: dict[str, Any] = {**planned.faster(self.speed), "operation_overhead_s": 0.0}
        changes["backward_forwards"] = gradients / self.share
        for kept, field in _REFORWARDS.items():
            if kept in self.forwards:
                changes[field] = max(0.0, self.forwards[kept] - 1 - gradients)
        found = rates.model_copy(update=changes)
        return found.model_copy(update={"operation_overhead_s": self._overhead_s(found)})

    def _overhead_s(self, found: HardwareProfile) -> float:
        """What is left of the time of each compute operation when its arithmetic takes what was found."""
        compute = [op.stream == "compute" for op in self.program.ops]
        seconds = itertools.compress(program_seconds(self.program, self.facts, found), compute)
        return max(0.0, self.taken_s - sum(seconds)) / sum(compute)


def computed(
    timelines: Sequence[Timeline], program: Program, facts: ModelFacts, profile: HardwareProfile
) -> Computed | None:
    """What compute took in measured steps of ``program``; None where they have no layer's forward and backward."""
    steps = [{span.op: span for span in timeline.spans} for timeline in timelines]
    forward, backward = (_in_forwards(kind, steps, program, facts, profile) for kind in ("forward", "backward"))
    kinds = forward.keys() & backward.keys()
    if not kinds:
        return None
    one = median(forward.get("none") or itertools.chain(*forward.values()))
    both = {kept: (median(forward[kept]) + median(backward[kept])) / one for kept in kinds}
    share = mean(backward_forwards(layer, profile) / profile.backward_forwards for layer in facts.layers)
    return Computed(1 / one, both, share, program, facts, median(sum(_took(program, spans)) for spans in steps))


def _in_forwards(
    kind: str, steps: Sequence[Mapping[str, Span]], program: Program, facts: ModelFacts, profile: HardwareProfile
) -> dict[Internals, list[float]]:
    """How long each layer's operations of a kind took, in forwards that the profile promises, by what was kept."""
    found: dict[Internals, list[float]] = defaultdict(list)
    for op in program.ops:
        if op.kind == kind and facts.units[op.unit].kind == "layer":
            promised_s = forward_seconds(facts.units[op.unit], facts, profile)
            for spans in steps:
                if op.id in spans:
                    found[op.internals].append(_lasted(spans[op.id]) / promised_s)
    return dict(found)


def _took(program: Program, spans: Mapping[str, Span]) -> Iterator[float]:
    """Seconds of each compute operation, with those before it in which it could have begun.

    A copy that the host gave late is taken for one that was given in time, for that too is the host's overhead.
    """
    last: dict[str, float] = defaultdict(float)
    could_end: dict[str, float] = {}
    for op in program.ops:
        span = spans.get(op.id)
        if span is None:
            continue
        could_begin = max([last[op.stream], *(could_end[name] for name in op.after if name in could_end)])
        last[op.stream] = span.end_s
        could_end[op.id] = min(span.end_s, could_begin + _lasted(span))
        if op.stream == "compute":
            could_end[op.id] = span.end_s
            yield span.end_s - min(span.start_s, could_begin)


def _lasted(span: Span) -> float:
    return span.end_s - span.start_s
