"""The search of a job's batch on its node: the job as it is opened there, and the answer that is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.cluster.runs import RunOrder
from lazytrain.platform.demo.machine import base_profile
from lazytrain.platform.searching import answer, open_job
from lazytrain.platform.trial import Report
from lazytrain.platform.tuning import Search, Trial


def test_a_job_is_planned_on_its_node_and_the_best_batch_is_kept(
    tiny_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAZYTRAIN_HOME", str(tmp_path / "home"))
    rules = ("plan.nvme=null", "plan.planner=every_layer", "train.batch=auto")
    order = RunOrder(
        job="j-0000000001",
        claim="c",
        attempt=1,
        spec=load_spec(tiny_job, rules).model_dump(mode="json"),
        policy={},
        device={"kind": "cpu"},
        run_dir=tmp_path / "run",
        node="a",
        gpu="0",
        cpus=1,
        search={"profile": base_profile().model_dump(mode="json"), "kind": "big", "memory_share": 0.9},
    )
    job, rows, profile = open_job(order)
    assert len(rows) == job.rows.train == 240
    facts, plan = job.plan_at(profile, 4)
    best = Trial(4, Report(fits=True, tokens_per_s=100.0, step_s=1.0), plan, facts)
    found = answer(job, profile, "big", Search(best, [best]))
    assert (found["batch"], found["steps"], found["kind"]) == (4, 60, "big")
    assert Policy.model_validate(found["way"]["policy"]).micro_batch == 4
    assert found["trials"][0]["tokens_per_s"] == 100.0
