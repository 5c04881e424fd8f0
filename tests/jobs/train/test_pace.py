from types import SimpleNamespace

import pytest

from lazytrain.jobs.train import shown
from lazytrain.jobs.train.pace import Pace

BATCH = SimpleNamespace(tokens=50)


def test_the_time_left_is_the_plans_until_it_is_measured() -> None:
    pace = Pace(predicted_step_s=2.0)
    assert pace.eta_s(100) == 200.0
    pace.add(BATCH, 4.0)
    assert pace.eta_s(100) == pytest.approx(100 * (0.1 * 4.0 + 0.9 * 2.0))
    for _ in range(9):
        pace.add(BATCH, 4.0)
    assert pace.eta_s(10) == pytest.approx(40.0)
    assert (pace.step_s, pace.tokens_per_s) == (4.0, 12.5)


def test_without_a_prediction_the_time_left_is_known_after_a_step() -> None:
    pace = Pace(None)
    assert pace.eta_s(5) is None
    pace.add(BATCH, 3.0)
    assert pace.eta_s(5) == 15.0


def test_the_progress_line() -> None:
    record = {"loss": 1.23456, "tokens_per_s": 12345.6, "eta_s": 3725.4}
    assert shown(record) == "loss 1.235, 12,346 tokens/s, 1:02:05 left"
    assert shown({"loss": 1.0, "tokens_per_s": 5.0}) == "loss 1.000, 5 tokens/s"
