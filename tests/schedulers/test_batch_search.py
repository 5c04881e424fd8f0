"""The search of the micro-batch on synthetic machines whose best batch is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lazytrain.jobs.errors import DoesNotFit, InputError
from lazytrain.schedulers.batch_search import PROBES, BatchSearch, Objective, Probe


def search(low: int, high: int, objective: Objective, limit: float, rate: Callable[[int], float]) -> BatchSearch:
    """Run a search on a machine on which batches up to ``limit`` fit."""
    searching = BatchSearch(low, high, objective)
    while (batch := searching.ask()) is not None:
        fits = batch <= limit
        searching.tell(batch, Probe(fits, rate(batch) if fits else 0.0, batch * 1000, "" if fits else "out of memory"))
    return searching


def saturating(batch: int) -> float:
    return batch / (batch + 3)


@pytest.mark.parametrize("low,high", [(1, 1), (1, 2), (1, 7), (3, 20), (1, 128)])
def test_max_batch_finds_every_limit_in_logarithmic_time(low: int, high: int) -> None:
    for limit in range(low, high + 1):
        searching = search(low, high, "max_batch", limit, saturating)
        assert searching.best.batch == limit
        assert len(searching.trials) <= (high - low + 1).bit_length() + 1


def test_max_batch_from_128_finds_100() -> None:
    assert search(1, 128, "max_batch", 100, saturating).best.batch == 100


@pytest.mark.parametrize("objective", ["throughput", "max_batch"])
def test_nothing_fits_names_every_probe(objective: Objective) -> None:
    searching = search(1, 64, objective, 0.5, saturating)
    assert 1 in {trial.batch for trial in searching.trials}
    with pytest.raises(DoesNotFit, match=r"batch 1: out of memory, peak 1000B") as caught:
        _ = searching.best
    assert len(caught.value.reasons) == len(searching.trials)
    assert caught.value.exit_code == 3 and caught.value.hint


@pytest.mark.parametrize("high", [1, 2, 3, 8, 64, 256])
@pytest.mark.parametrize("peak", [1, 3, 10, 40, 1000])
@pytest.mark.parametrize("limit", [1, 2, 9, 50, 1000])
def test_throughput_comes_close_to_the_best_batch_with_few_probes(high: int, peak: int, limit: int) -> None:
    def rate(batch: int) -> float:
        return saturating(batch) / (1 + max(0, batch - peak) / 100)

    searching = search(1, high, "throughput", limit, rate)
    best = max(rate(batch) for batch in range(1, min(high, limit) + 1))
    assert len(searching.trials) <= PROBES
    assert searching.best.probe.tokens_per_s >= 0.93 * best


def test_throughput_prefers_a_faster_smaller_batch() -> None:
    searching = search(1, 64, "throughput", 64, lambda batch: 100 - abs(batch - 8))
    assert searching.best.batch < 16


def test_asking_again_gives_the_same_batch_until_it_is_told() -> None:
    searching = BatchSearch(1, 16, "max_batch")
    assert searching.ask() == searching.ask() == 16
    searching.tell(16, Probe(fits=False, reason="out of memory"))
    assert searching.ask() == 8


def test_same_answers_lead_to_same_questions() -> None:
    first, second = (search(1, 200, "throughput", 77, saturating).trials for _ in range(2))
    assert first == second


def test_bad_ranges_objectives_and_answers_are_refused() -> None:
    for low, high in ((0, 4), (5, 4)):
        with pytest.raises(InputError):
            BatchSearch(low, high)
    with pytest.raises(InputError, match="speed"):
        BatchSearch(1, 4, "speed")  # type: ignore[arg-type]
    searching = BatchSearch(1, 4)
    searching.tell(2, Probe(fits=True))
    for batch in (2, 9):
        with pytest.raises(InputError):
            searching.tell(batch, Probe(fits=True))
