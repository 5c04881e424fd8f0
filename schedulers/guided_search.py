"""Which micro-batch to train with, where a prediction says what to expect: probes tell how far it can be trusted.

    search = GuidedSearch(1, 64, "throughput", expect)
    while (batch := search.ask()) is not None:
        search.tell(batch, run_probe(batch))
    print(search.best)

What is expected costs no probe, so batches that are not expected to fit, or to be fast, are not tried.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Final

from .batch_search import BatchSearch, Objective, Trial

PROBES: Final = 4
"""Most batches that a search for throughput probes."""
REPEATS: Final = 3
"""Most probes that are made once more, where the machine is so restless that one does not tell."""
_QUIET = 0.005
"""Standard error of probes up to which none is repeated."""
_ALIKE, _ERRORS = 0.05, 3.0
"""Batches may be as fast as the fastest within this share, and within so many standard errors."""
_RUNGS: Final = 6
"""Batches of which the speed is asked at first, evenly on a logarithmic scale up to the largest expected to fit."""
_EDGE: Final = 16
"""The largest batch is found to within this part of it: the speed is much the same there."""
_BELOW: Final = 8
"""Below a batch that did not fit, the next one is smaller by this part of it, then by twice as much, and so on."""
_ROUNDS: Final = 2
"""How often the batches in the middle of the gaps beside the best of them are asked about too."""
_NEAR: Final = 1.06
"""Batches that differ by less than this factor are as good as one."""
_DOUBT, _MOST_DOUBT, _WRONG = 0.4, 0.15, 0.3
"""By which share a batch may be faster than it promises: for each unit of the logarithm between it and a probe, at
most, and by how much more of that for each unit of the logarithm by which probes were not as expected."""
_WORTH: Final = 0.01
"""Gain for which one more probe is made."""


class GuidedSearch(BatchSearch):
    """`BatchSearch` inside what is expected.

    ``expect`` gives the tokens per second that are predicted at a micro-batch, 0 for one that is not expected to fit;
    it is asked once for each of about a dozen batches. ``throughput`` tries the batch with the highest expectation.
    From then on expectations are scaled by measured over expected, interpolated on a logarithmic scale of the batch,
    with a benefit of the doubt that grows with the distance from what was measured; the most promising batch is next
    while it may be faster than what was measured, up to ``most`` batches. Where probes are uncertain, those that may be
    the fastest are probed once more: what else a machine does only slows it down, so the faster one counts.
    ``max_batch`` begins with the largest that is expected to fit, and if that was too much, looks close below it first.
    Raises as `BatchSearch` does, and what ``expect`` raises.
    """

    def __init__(
        self, low: int, high: int, objective: Objective, expect: Callable[[int], float], most: int = PROBES
    ) -> None:
        super().__init__(low, high, objective)
        self._ask_expected = expect
        self._most = most
        self._expected: dict[int, float] = {}
        self._next: tuple[int, int | None] | None = None
        """The answer to `ask`, and after how many trials it was found."""

    def ask(self) -> int | None:
        """The micro-batch to probe next, the same until it is told; None when the search has ended."""
        if self._next is None or self._next[0] != len(self.trials):
            self._next = len(self.trials), self._decide()
        return self._next[1]

    def _decide(self) -> int | None:
        fits, fails = self._bounds()
        if fails == self.low:
            return None
        if self.objective == "throughput":
            return self._most_promising(fails)
        return self._close_below(fits, fails) if fails - fits > 1 else None

    # ---- the largest

    def _close_below(self, fits: int, fails: int) -> int | None:
        """The largest that is expected to fit; below one that did not, further away each time until one does."""
        failed = sum(not trial.probe.fits for trial in self.trials)
        if fits >= self.low and failed:
            return (fits + fails) // 2
        largest = self._largest_expected(fits, fails, exact=True)
        if not failed:
            return largest if largest > fits else (None if fits >= self.low else self.low)
        return max(self.low, min(largest, fails - max(1, (fails << (failed - 1)) // _BELOW)))

    def _largest_expected(self, fits: int, fails: int, *, exact: bool = False) -> int:
        """The largest batch between these that is expected to fit; ``fits`` if there is none."""
        few, many = fits, fails
        if many > self.high and self._expect(self.high) > 0:
            return self.high
        many = min(many, self.high)
        while many - few > (1 if exact else max(1, few // _EDGE)):
            middle = (few + many) // 2
            few, many = (middle, many) if self._expect(middle) > 0 else (few, middle)
        return few

    # ---- the fastest

    def _most_promising(self, fails: int) -> int | None:
        told = self._told()
        if len(told) >= self._most:
            return self._once_more()
        self._ask_about_rungs()
        hopeful = self._hopeful(fails)
        if not hopeful:
            return None if self.low in told else self.low
        fitting = [trial for trial in self._fastest() if self._expect(trial.batch) > 0]
        if not fitting:
            return self._first(hopeful, fails)
        promise = _Promise(fitting, self._expect)
        self._ask_beside(promise, fails)
        untold = [batch for batch in self._hopeful(fails) if batch not in told]
        best = self._best_of(untold, promise) if untold else None
        worth_it = (1.0 + _WORTH) * self.best.probe.tokens_per_s
        return best if best is not None and promise(best) > worth_it else self._once_more()

    def _fastest(self) -> list[Trial]:
        """The faster probe of each batch that fits."""
        found: dict[int, Trial] = {}
        for trial in sorted(self._fitting(), key=lambda trial: trial.probe.tokens_per_s):
            found[trial.batch] = trial
        return list(found.values())

    def _may_be_told(self, batch: int) -> bool:
        return super()._may_be_told(batch) or batch == self._once_more()

    def _once_more(self) -> int | None:
        """The fastest batch that was probed once and may be the best; None where that is clear, or has to do."""
        fastest = self._fastest()
        error = median(trial.probe.spread for trial in fastest) if fastest else 0.0
        times = Counter(trial.batch for trial in self.trials)
        if error <= _QUIET or times.total() - len(times) >= REPEATS:
            return None
        nearly = self.best.probe.tokens_per_s * (1.0 - _ALIKE - _ERRORS * error)
        may_be = [trial for trial in fastest if trial.probe.tokens_per_s >= nearly]
        once = [trial for trial in may_be if times[trial.batch] == 1]
        return max(once, key=lambda trial: trial.probe.tokens_per_s).batch if once and len(may_be) > 1 else None

    def _first(self, hopeful: list[int], fails: int) -> int:
        """The best expectation; after one that was too much, it may be just below that."""
        if self.trials and (close := fails - max(1, fails // _BELOW)) >= self.low and self._expect(close) > 0:
            hopeful = [*hopeful, close]
        return self._best_of(hopeful, self._expect)

    def _expect(self, batch: int) -> float:
        if batch not in self._expected:
            self._expected[batch] = self._ask_expected(batch)
        return self._expected[batch]

    def _ask_about_rungs(self) -> None:
        if self._expected:
            return
        largest = self._largest_expected(self.low - 1, self.high + 1)
        if largest >= self.low:
            ratio = largest / self.low
            for batch in {round(self.low * ratio ** (rung / (_RUNGS - 1))) for rung in range(_RUNGS)}:
                self._expect(batch)
            for _ in range(_ROUNDS):
                self._ask_beside(self._expect, self.high + 1)

    def _hopeful(self, fails: int) -> list[int]:
        return sorted(batch for batch, speed in self._expected.items() if speed > 0 and batch < fails)

    @staticmethod
    def _best_of(batches: list[int], speed: Callable[[int], float]) -> int:
        return max(batches, key=lambda batch: (speed(batch), -batch))

    def _ask_beside(self, speed: Callable[[int], float], fails: int) -> None:
        """Learn what is expected in the middle of the gaps beside the fastest batch, up to one that did not fit."""
        known = [*self._hopeful(fails), *([fails] if fails <= self.high else [])]
        place = known.index(self._best_of(self._hopeful(fails), speed))
        for lower, upper in list(pairwise(known))[max(0, place - 1) : place + 1]:
            middle = self._between(lower, upper)
            if middle is not None and upper / lower > _NEAR:
                self._expect(middle)


class _Promise:
    """What a batch may reach: what is expected, times measured over expected as the batches that fitted say, and more
    than that the further it is from all of them, and the less they were as expected."""

    def __init__(self, fitting: list[Trial], expect: Callable[[int], float]) -> None:
        self._expect = expect
        self._known = sorted(
            (math.log(trial.batch), math.log(trial.probe.tokens_per_s / expect(trial.batch))) for trial in fitting
        )
        off = [known for _, known in self._known]
        wrong = max(off) - min(off) if len(off) > 1 else abs(off[0])
        self._most_doubt = _MOST_DOUBT + _WRONG * wrong

    def __call__(self, batch: int) -> float:
        place = math.log(batch)
        away = min(abs(place - known) for known, _ in self._known)
        return self._expect(batch) * math.exp(self._at(place)) * (1.0 + min(self._most_doubt, _DOUBT * away))

    def _at(self, place: float) -> float:
        """Between two batches on the line through them; beyond the last on half the slope of the line there."""
        if len(self._known) == 1:
            return self._known[0][1]
        inside = min(max(place, self._known[0][0]), self._known[-1][0])
        pairs = list(pairwise(self._known))
        lower, upper = next((pair for pair in pairs if inside <= pair[1][0]), pairs[-1])
        slope = (upper[1] - lower[1]) / (upper[0] - lower[0])
        return lower[1] + slope * (inside - lower[0]) + 0.5 * slope * (place - inside)
