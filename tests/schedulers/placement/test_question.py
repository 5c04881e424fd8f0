"""What cannot be decided is refused when the question is put."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lazytrain.jobs.errors import InputError
from lazytrain.schedulers.placement import Question, Rules


def test_run_time_follows_from_the_prediction(make: Any) -> None:
    option = make.option("RTX3090", hours=2, startup_s=60.0)
    assert option.seconds == 2 * 3600 + 60


@pytest.mark.parametrize("changes", [{"rate": 0.0}, {"rate": math.nan}, {"host": -1}, {"dram_bytes_s": math.inf}])
def test_demands_that_make_no_sense(make: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        make.option(**changes)


def test_ids_and_places_are_unique(make: Any) -> None:
    node = make.node("a")
    for wrong in (
        {"waiting": (make.job("x"), make.job("x"))},
        {"waiting": (make.job("x"),), "running": (make.running("x", "a", "0"),)},
        {"nodes": (node, node)},
        {"running": (make.running("x", "a", "0"), make.running("y", "a", "0"))},
        {"running": (make.running("x", "a", "7"),)},
    ):
        fields: dict[str, Any] = {"waiting": (), "running": (), "nodes": (node,)}
        with pytest.raises(InputError):
            Question(now_s=0.0, **(fields | wrong))


def test_quota_of_a_user_replaces_that_of_everybody() -> None:
    rules = Rules(quota={"*": {"H800": 2}, "ada": {"RTX3090": 1}})
    assert rules.most_gpus("bob", "H800") == 2
    assert rules.most_gpus("ada", "H800") == math.inf
    assert rules.most_gpus("ada", "RTX3090") == 1


@pytest.mark.parametrize("wrong", [{"ageing_s": 0.0}, {"min_run_s": -1.0}, {"shares": {"ada": 0.0}}])
def test_rules_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Rules(**wrong)
