from __future__ import annotations

import itertools

import pytest

from lazytrain.jobs.schedule import learning_rate
from lazytrain.jobs.spec import Train


def rates(total=100, **options):
    section = Train(learning_rate=1.0, **options)
    return [learning_rate(section, step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize("warmup, steps", [(0.1, 10), (20, 20), (0, 0), (0.999, 100), (500, 100)])
def test_the_warm_up_is_a_line_to_the_peak(warmup, steps):
    curve = rates(schedule="constant", warmup=warmup)
    assert curve[:steps] == pytest.approx([(i + 1) / steps for i in range(steps)])
    assert all(rate == 1.0 for rate in curve[steps:])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_falling_schedule_ends_at_zero(schedule):
    curve = rates(schedule=schedule, warmup=0.1)
    assert curve[-1] == pytest.approx(0.0, abs=1e-12)
    assert all(a >= b for a, b in itertools.pairwise(curve))
    assert curve[54] == pytest.approx(0.5, abs=0.01)


def test_one_step_is_enough():
    assert rates(total=1, schedule="cosine", warmup=0.03) == [1.0]
