"""What ``train`` and ``tune`` ask of a job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazytrain.jobs import introspect
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.cli.job import Job
from lazytrain.platform.known_facts import KnownFacts
from lazytrain.platform.planning import Limits
from lazytrain.schedulers.hardware import hardware


def test_a_batch_that_was_planned_for_is_not_measured_again(
    tiny_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []

    def measured(source: Any, **shape: Any) -> Any:
        batches.append(shape["micro_batch"])
        return measure(source, **shape)

    measure = introspect.model_facts
    monkeypatch.setattr(introspect, "model_facts", measured)
    data: Any = SimpleNamespace(train=SimpleNamespace(longest=8))
    spec, limits = load_spec(tiny_job, ("train.batch=4",)), Limits(planner="every_layer")
    for _ in range(2):  # two commands, one after the other
        job = Job(spec, data, "cpu", hardware("RTX3090"), limits, KnownFacts(tmp_path / "facts"))
        answer = job.plan()
        assert answer.policy is not None and answer.policy.micro_batch == 4
    assert batches == [4]
