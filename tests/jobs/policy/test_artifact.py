"""Policy files: what is no number, no word and no choice in them is refused with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import InputError
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.policy.artifact import Certificate


def written(policy: Policy, **changes: Any) -> str:
    return json.dumps(policy.model_dump(mode="json", by_alias=True) | changes)


@pytest.fixture
def policy(make_facts: Callable[..., ModelFacts]) -> Policy:
    certificate = Certificate(planner="full", objective_s=1.0, bound_s=1.0, gap=0.0)
    return Policy.from_homes(make_facts(2), ["gpu"] * 3).model_copy(update={"certificate": certificate})


def test_a_policy_is_read_back(tmp_path: Path, policy: Policy) -> None:
    policy.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json") == policy


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"weight_slots": "2"}, "weight_slots"),
        ({"accumulation": True}, "accumulation"),
        ({"micro_batch": 2.0}, "micro_batch"),
        ({"direct_nvme": "yes"}, "direct_nvme"),
        ({"boundaries": [{"index": "0", "home": "gpu"}]}, "boundaries.0.index"),
        ({"layers": [{"index": 0, "resident": 1}]}, "layers.0.resident"),
        ({"optimizer": {"block_size": "256"}}, "optimizer.block_size"),
        ({"optimizer": {"eight_bit_fraction": True}}, "optimizer.eight_bit_fraction"),
        ({"certificate": {"planner": "full", "gap": float("nan")}}, "certificate.gap"),
    ],
)
def test_what_is_something_else_is_not_taken_for_it(
    tmp_path: Path, policy: Policy, changes: dict[str, Any], place: str
) -> None:
    path = tmp_path / "policy.json"
    path.write_text(written(policy, **changes))
    with pytest.raises(InputError, match=f"{place}: "):
        Policy.load(path)
