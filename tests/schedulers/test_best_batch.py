"""The best batch by prediction: not the largest where keeping more pays, and found among divisors when accumulating."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from lazytrain.jobs.errors import DoesNotFit, InputError, OutOfTime
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.schedulers.best_batch import best_batch
from lazytrain.schedulers.costs import state_bytes
from lazytrain.schedulers.hardware import HardwareProfile

MIB = 1 << 20
Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]


def facts_at(make_facts: Make, batch: int, *, parameters: int = MIB // 8) -> ModelFacts:
    """Boundaries of a quarter MiB and 1e9 operations per row, layers whose weights load faster than that."""
    return make_facts(
        6, boundary=batch * MIB // 4, parameters=parameters, flops=batch * 1e9, workspace=batch * MIB, micro_batch=batch
    )


def test_a_smaller_batch_that_keeps_internals_beats_the_largest(make_facts: Make, make_profile: Machine) -> None:
    profile = make_profile(gpu_memory_bytes=64 * MIB, h2d_bytes_s=2e9, d2h_bytes_s=2e8)
    found = best_batch(partial(facts_at, make_facts), profile, high=64)
    assert found.best.micro_batch < found.largest.micro_batch
    assert found.best.tokens_per_s > found.largest.tokens_per_s
    assert f"faster than {found.largest.micro_batch}, the largest that fits" in found.words
    assert "keeps the internals" in found.words
    assert [tried.micro_batch for tried in found.tried] == sorted({tried.micro_batch for tried in found.tried})
    beside_rules = [tried.micro_batch for tried in found.tried if tried.answer.baselines]
    assert beside_rules == [found.best.micro_batch]


def test_the_largest_batch_wins_where_weights_are_the_traffic(make_facts: Make, make_profile: Machine) -> None:
    profile = make_profile(gpu_memory_bytes=64 * MIB, h2d_bytes_s=2e8, d2h_bytes_s=2e8)
    found = best_batch(partial(facts_at, make_facts, parameters=MIB), profile, high=8)
    assert found.best.micro_batch >= found.largest.micro_batch // 2
    assert found.best.tokens_per_s > 2 * found.tried[0].tokens_per_s


def test_micro_batches_divide_the_global_batch(make_facts: Make, make_profile: Machine) -> None:
    profile = make_profile(gpu_memory_bytes=64 * MIB)
    found = best_batch(partial(facts_at, make_facts), profile, high=16, global_batch=12)
    assert {tried.micro_batch for tried in found.tried} <= {1, 2, 3, 4, 6, 12}
    assert all(tried.micro_batch * tried.accumulation == 12 for tried in found.tried)


def test_a_host_with_no_room_to_sum_gradients_up_takes_the_batch_whole(make_facts: Make, make_profile: Machine) -> None:
    """Sums of micro-batches are float32: two bytes a parameter more than the gradient of one."""
    facts = facts_at(make_facts, 1, parameters=4 * MIB)
    needed = sum(state_bytes(facts).values()) + 12 * MIB
    assert needed < sum(state_bytes(facts, accumulation=2).values())
    profile = make_profile(host_memory_bytes=needed)
    found = best_batch(partial(facts_at, make_facts, parameters=4 * MIB), profile, high=8, global_batch=8)
    assert (found.best.micro_batch, found.best.accumulation) == (8, 1)
    with pytest.raises(DoesNotFit):  # no whole batch is within the range
        best_batch(partial(facts_at, make_facts, parameters=4 * MIB), profile, high=4, global_batch=8)


def test_no_time_is_not_no_room(make_facts: Make, make_profile: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_time(*_: object, **__: object) -> None:
        raise OutOfTime("nothing was found in the time it had")

    monkeypatch.setattr("lazytrain.schedulers.best_batch.plan", out_of_time)
    with pytest.raises(OutOfTime):
        best_batch(partial(facts_at, make_facts), make_profile(), high=4)


def test_nothing_fits_or_nothing_to_search(make_facts: Make, make_profile: Machine) -> None:
    with pytest.raises(DoesNotFit) as caught:
        best_batch(partial(facts_at, make_facts), make_profile(gpu_memory_bytes=MIB))
    assert caught.value.reasons[0]["resource"] == "gpu_memory"
    for wrong in ({"low": 4, "high": 2}, {"low": 5, "high": 7, "global_batch": 16}):
        with pytest.raises(InputError):
            best_batch(partial(facts_at, make_facts), make_profile(), **wrong)
