"""Which micro-batch trains fastest, by prediction alone: the most tokens per second, not the most rows.

With few rows more of each layer fits on the GPU and less is run twice; with many, each load of the weights serves more
tokens. Where the balance lies depends on the links, so batches are planned and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from ..jobs.errors import DoesNotFit, InputError, OutOfTime
from ..jobs.model_facts import ModelFacts
from .hardware import HardwareProfile
from .planner import Plan, beside_rules, fits, plan

GRID: Final = 6
"""Batches tried between the smallest and the largest that fits, evenly on a logarithmic scale."""
ALIKE: Final = 0.005
"""Batches whose speeds differ by less than this share are equally good; the smaller one is taken."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A micro-batch with its plan."""

    micro_batch: int
    accumulation: int
    answer: Plan

    @property
    def tokens_per_s(self) -> float:
        """Predicted speed; 0 if it does not fit."""
        return self.answer.predicted.tokens_per_s if self.answer.predicted else 0.0


@dataclass(frozen=True, slots=True)
class BestBatch:
    """The fastest micro-batch, and all that were tried, smallest first."""

    best: Tried
    tried: tuple[Tried, ...]

    @property
    def largest(self) -> Tried:
        """The largest micro-batch that was found to fit."""
        return max((t for t in self.tried if t.answer.feasible), key=lambda t: t.micro_batch)

    @property
    def words(self) -> str:
        """What a person should know about the choice."""
        best, largest = self.best, self.largest
        if best.micro_batch == largest.micro_batch:
            return f"micro-batch {best.micro_batch}, the largest that fits, is the fastest"
        gain = best.tokens_per_s / largest.tokens_per_s - 1
        kept = _kept(best) - _kept(largest)
        why = f": it keeps the internals of {kept} more layers" if kept > 0 else ""
        return (
            f"micro-batch {best.micro_batch} is {100 * gain:.1f} % faster than {largest.micro_batch}, "
            f"the largest that fits{why}"
        )


def best_batch(
    facts_of: Callable[[int], ModelFacts],
    profile: HardwareProfile,
    *,
    low: int = 1,
    high: int = 512,
    global_batch: int | None = None,
    **options: Any,
) -> BestBatch:
    """The micro-batch in ``low..high`` with the most predicted tokens per second.

    ``facts_of`` gives the model's facts at a micro-batch. With ``global_batch`` only its divisors are considered and
    the rest is accumulation; without, steps are of one micro-batch. ``options`` are those of `plan`; what fixed rules
    would take is looked at for the best batch alone. Raises DoesNotFit with the smallest batch's reasons if nothing
    fits, OutOfTime if nothing was found for it in time, InputError for an empty range.
    """
    batches = _batches(low, high, global_batch)
    smallest = _plan(facts_of, profile, batches[0], global_batch, options)
    known = {smallest.micro_batch: smallest}

    def attempt(batch: int) -> None:
        if batch not in known:
            try:
                known[batch] = _plan(facts_of, profile, batch, global_batch, options)
            except OutOfTime:  # at the very edge of what fits: not worth more time
                known[batch] = Tried(batch, (global_batch or batch) // batch, Plan(feasible=False))

    def fit(batch: int) -> bool:
        accumulation = (global_batch or batch) // batch
        memory = {name: options[name] for name in ("gpu_memory", "host_memory", "nvme", "optimizer") if name in options}
        return fits(facts_of(batch), profile, accumulation=accumulation, **memory)

    fitting = _up_to(_largest(batches, fit), batches) if smallest.answer.feasible else []
    if (whole := batches[-1]) == global_batch and whole not in fitting and fit(whole):
        fitting.append(whole)  # a step of one micro-batch sums no gradients up in float32: less host memory
    if fitting:
        for batch in _grid(fitting):
            attempt(batch)
        _refine(fitting, known, attempt)
    tried = tuple(known[batch] for batch in sorted(known))
    fastest = max(t.tokens_per_s for t in tried)
    if not fastest:
        raise _nothing_fits(smallest)
    best = next(t for t in tried if t.tokens_per_s >= fastest * (1 - ALIKE))
    known[best.micro_batch] = best = _beside_rules(best, facts_of, profile, options)
    return BestBatch(best, tuple(known[batch] for batch in sorted(known)))


def _batches(low: int, high: int, global_batch: int | None) -> list[int]:
    if not 1 <= low <= high:
        raise InputError(f"the batch is searched in a range low..high with 1 <= low <= high, not {low}..{high}")
    batches = [b for b in range(low, high + 1) if global_batch is None or global_batch % b == 0]
    if not batches:
        raise InputError(f"no micro-batch from {low} to {high} divides the global batch {global_batch}")
    return batches


def _plan(
    facts_of: Callable[[int], ModelFacts],
    profile: HardwareProfile,
    batch: int,
    global_batch: int | None,
    options: dict[str, Any],
) -> Tried:
    accumulation = (global_batch or batch) // batch
    answer = plan(facts_of(batch), profile, accumulation=accumulation, baselines=False, **options)
    return Tried(batch, accumulation, answer)


def _beside_rules(
    tried: Tried, facts_of: Callable[[int], ModelFacts], profile: HardwareProfile, options: dict[str, Any]
) -> Tried:
    facts, number = facts_of(tried.micro_batch), tried.accumulation
    return replace(tried, answer=beside_rules(tried.answer, facts, profile, accumulation=number, **options))


def _nothing_fits(first: Tried) -> DoesNotFit:
    reasons = first.answer.reasons
    return DoesNotFit(
        f"not even a micro-batch of {first.micro_batch} fits",
        reasons=tuple(reason.model_dump(mode="json") for reason in reasons),
        hint=reasons[0].hint if reasons else "",
    )


def _largest(batches: list[int], fit: Callable[[int], bool]) -> int:
    """The largest batch that fits, to within a sixteenth: doubling, then bisection.

    More rows never fit where fewer do not, and the first batch does.
    """
    few, step = 0, 1
    many = len(batches)
    while few + step < len(batches):
        if not fit(batches[few + step]):
            many = few + step
            break
        few += step
        step *= 2
    while many - few > max(1, few // 16):
        middle = (few + many) // 2
        few, many = (middle, many) if fit(batches[middle]) else (few, middle)
    return batches[few]


def _up_to(largest: int, batches: list[int]) -> list[int]:
    return [batch for batch in batches if batch <= largest]


def _grid(batches: list[int]) -> list[int]:
    ratio = batches[-1] / batches[0]
    wanted = [batches[0] * ratio ** (k / (GRID - 1)) for k in range(GRID)]
    return sorted({min(batches, key=lambda b, w=w: abs(b - w)) for w in wanted})  # type: ignore[misc]


def _refine(batches: list[int], known: dict[int, Tried], attempt: Callable[[int], None]) -> None:
    """Try the middles beside the best until it is better than both."""
    for _ in range(3):
        tried = sorted(batch for batch in known if batch in batches)
        best = max(tried, key=lambda b: known[b].tokens_per_s)
        place = tried.index(best)
        for other in (*tried[max(0, place - 1) : place], *tried[place + 1 : place + 2]):
            between = [b for b in batches if min(best, other) < b < max(best, other)]
            if between:
                attempt(between[len(between) // 2])


def _kept(tried: Tried) -> int:
    policy = tried.answer.policy
    return sum(layer.internals != "none" for layer in policy.layers) if policy else 0
