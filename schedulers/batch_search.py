"""Which micro-batch to train with: a search that asks for probes and is told what they measured.

    search = BatchSearch(1, 64, "throughput")
    while (batch := search.ask()) is not None:
        search.tell(batch, run_probe(batch))
    print(search.best)

It knows nothing of how probes are run. The same answers lead to the same questions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, Final, Literal

from ..jobs.errors import DoesNotFit, InputError
from ..jobs.units import format_bytes

Objective = Literal["throughput", "max_batch"]
PROBES: Final = 6
"""Most probes of a search for throughput."""
GRID: Final = 4
"""How many of them are spread evenly, on a logarithmic scale, over the whole range."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What one probe of a micro-batch measured."""

    fits: bool
    tokens_per_s: float = 0.0
    peak_gpu_bytes: int = 0
    reason: str = ""
    """Why it did not fit, in words."""
    spread: float = 0.0
    """Standard error of ``tokens_per_s``, as a share of it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A micro-batch and its probe."""

    batch: int
    probe: Probe


class BatchSearch:
    """Ask-and-tell search of the micro-batch in ``low..high``.

    ``max_batch`` bisects between what was seen to fit and what was seen not to, after one try of ``high`` itself.
    ``throughput`` looks for the most tokens per second, which is often not the largest batch: it goes up a coarse grid
    until something does not fit, then refines around the best, with at most `PROBES` probes. Raises InputError for an
    empty range or an unknown objective.
    """

    def __init__(self, low: int, high: int, objective: Objective = "throughput") -> None:
        if not 1 <= low <= high:
            raise InputError(f"the batch is searched in a range low..high with 1 <= low <= high, not {low}..{high}")
        if objective not in ("throughput", "max_batch"):
            raise InputError(f"no objective is called {objective!r}", hint="choose one of throughput, max_batch")
        self.low, self.high, self.objective = low, high, objective
        self.trials: list[Trial] = []
        """Every probe, in the order in which they were told."""

    def ask(self) -> int | None:
        """The micro-batch to probe next, the same until it is told; None when the search has ended."""
        return self._bisect() if self.objective == "max_batch" else self._climb()

    def tell(self, batch: int, probe: Probe) -> None:
        """Record a probe, asked for or not. Raises InputError for a batch outside the range, or told without need."""
        if not self._may_be_told(batch):
            raise InputError(f"batch {batch} is outside {self.low}..{self.high} or was told before")
        self.trials.append(Trial(batch, probe))

    @property
    def best(self) -> Trial:
        """The best trial so far. Raises DoesNotFit, with every probe as a reason, when none of them fits."""
        fitting = self._fitting()
        if not fitting:
            raise self._nothing_fits()
        if self.objective == "max_batch":
            return max(fitting, key=lambda trial: trial.batch)
        return max(fitting, key=lambda trial: (trial.probe.tokens_per_s, -trial.batch))

    def _may_be_told(self, batch: int) -> bool:
        return self.low <= batch <= self.high and batch not in self._told()

    def _told(self) -> set[int]:
        return {trial.batch for trial in self.trials}

    def _fitting(self) -> list[Trial]:
        """Trials of the batches that have always fitted."""
        failed = {trial.batch for trial in self.trials if not trial.probe.fits}
        return [trial for trial in self.trials if trial.batch not in failed]

    def _bounds(self) -> tuple[int, int]:
        """Largest batch that fits (low - 1: none yet) and the smallest above it that does not (high + 1: none)."""
        fits = max((trial.batch for trial in self._fitting()), default=self.low - 1)
        fails = min((t.batch for t in self.trials if not t.probe.fits and t.batch > fits), default=self.high + 1)
        return fits, fails

    def _bisect(self) -> int | None:
        fits, fails = self._bounds()
        if fails - fits <= 1:
            return None
        return self.high if fails > self.high else (fits + fails) // 2

    def _climb(self) -> int | None:
        told, (fits, fails) = self._told(), self._bounds()
        if len(told) >= PROBES or fails == self.low:
            return None
        untried = [batch for batch in self._grid() if batch not in told and fits < batch < fails]
        return untried[0] if untried else self._refine(fails)

    def _grid(self) -> list[int]:
        ratio = self.high / self.low
        return sorted({round(self.low * ratio ** (k / (GRID - 1))) for k in range(GRID)})

    def _refine(self, fails: int) -> int | None:
        """The middle, on a logarithmic scale, of a gap beside the best batch.

        The wider gap, where one above the largest batch that fits counts double: more rows have paid off so far.
        """
        fitting = sorted(trial.batch for trial in self._fitting())
        if not fitting:
            return self._between(self.low - 1, fails)
        best, told = self.best.batch, self._told()
        below = max((batch for batch in told if batch < best), default=self.low - 1)
        above = min((batch for batch in told if batch > best), default=self.high + 1)
        up, down = above / best, best / max(below, 0.5)
        upper_first = (up * up if best == fitting[-1] else up) >= down
        gaps = [(best, above), (below, best)] if upper_first else [(below, best), (best, above)]
        middles = [self._between(lower, upper) for lower, upper in gaps]
        return next((middle for middle in middles if middle is not None), None)

    @staticmethod
    def _between(lower: int, upper: int) -> int | None:
        """The whole number nearest to the geometric mean, strictly between; None if there is none."""
        if upper - lower < 2:
            return None
        return min(max(round(sqrt(max(lower, 0.5) * upper)), lower + 1), upper - 1)

    def _nothing_fits(self) -> DoesNotFit:
        tried = [_describe(trial) for trial in sorted(self.trials, key=lambda trial: trial.batch)]
        text = "; ".join(f"batch {one['batch']}: {one['hint']}" for one in tried) or "nothing was probed"
        return DoesNotFit(
            f"no micro-batch from {self.low} up fits ({text})",
            reasons=tuple(tried),
            hint="use shorter rows, give boundaries host memory or NVMe, or use a GPU with more memory",
        )


def _describe(trial: Trial) -> dict[str, Any]:
    peak = trial.probe.peak_gpu_bytes
    words = trial.probe.reason or "does not fit"
    return {
        "resource": "gpu_memory",
        "batch": trial.batch,
        "needed_bytes": peak,
        "hint": f"{words}, peak {format_bytes(peak)}" if peak else words,
    }
