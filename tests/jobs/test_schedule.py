"""The learning rate at every step, for every schedule and warm-up."""

from __future__ import annotations

import pytest

from lazytrain.jobs.schedule import learning_rate
from lazytrain.jobs.spec import Train


def rates(total: int, **options: object) -> list[float]:
    section = Train.model_validate({"learning_rate": 1.0, "warmup": 0.0, **options})
    return [learning_rate(section, step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [0.75, 0.5, 0.25, 0]),
        ("cosine", [0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    assert rates(4, schedule=schedule) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("decay", [4, 0.4])
def test_wsd_is_flat_and_then_falls_to_zero(decay: float) -> None:
    got = rates(10, schedule="wsd", warmup=2, decay=decay)
    assert got == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


def test_wsd_without_decay_and_with_nothing_else() -> None:
    assert rates(3, schedule="wsd", decay=0) == [1, 1, 1]
    assert rates(4, schedule="wsd", decay=100, warmup=2) == [0.5, 1, 0.5, 0]


@pytest.mark.parametrize("warmup", [5, 0.25])
def test_warm_up_by_steps_or_share(warmup: float) -> None:
    got = rates(20, schedule="constant", warmup=warmup)
    assert got == pytest.approx([0.2, 0.4, 0.6, 0.8, *[1.0] * 16])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("total", [1, 2, 7])
def test_never_negative_never_above_the_highest(schedule: str, total: int) -> None:
    for warmup in (0.0, 0.5, 3, 100):
        assert all(0 <= rate <= 1 for rate in rates(total, schedule=schedule, warmup=warmup, decay=2))
