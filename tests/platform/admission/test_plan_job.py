"""From a job file and the profiles of unlike nodes to the ways in which the job can run."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lazytrain.jobs.errors import DataError, ModelError
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.admission import Admission, AdmissionOrder, measuring
from lazytrain.platform.admission import plan_job as plan_job_module
from lazytrain.platform.admission.measuring import Here
from lazytrain.platform.demo.machine import base_profile
from lazytrain.schedulers.placement import Option

GIB = 1 << 30


class Once(Here):
    """Takes facts once: the tiny model is the same in every test."""

    taken: ClassVar[dict[tuple[int, int], ModelFacts]] = {}

    def facts(self, model: Any, *, batch: int, length: int, dtype: Any) -> ModelFacts:
        if (batch, length) not in self.taken:
            self.taken[batch, length] = super().facts(model, batch=batch, length=length, dtype=dtype)
        return self.taken[batch, length]


def plan_job(order: AdmissionOrder) -> Admission:
    return plan_job_module.plan_job(order, Once(Path(order.cache) / "facts"))


def plan_alone(order: AdmissionOrder) -> Admission:
    """Without what other tests have measured."""
    return plan_job_module.plan_job(order, Here(Path(order.cache) / "facts"))


def profile(kind: str, *, gpu: int = GIB, host: int = 8 * GIB, flops: float = 1e10) -> dict[str, Any]:
    fields = {"kind": kind, "gpu_memory_bytes": gpu, "host_memory_bytes": host, "matmul_flops": {"float32": flops}}
    return base_profile().model_copy(update=fields).model_dump(mode="json")


def order(job: Path, tmp_path: Path, *settings: str, **fields: Any) -> AdmissionOrder:
    rules = ("plan.nvme=null", "plan.planner=every_layer", "train.max_steps=5", "train.batch=4")
    spec = load_spec(job, (*rules, *settings)).model_dump(mode="json")
    profiles = fields.pop("profiles", {"big": profile("big")})
    return AdmissionOrder(job="j-1", spec=spec, profiles=profiles, cache=str(tmp_path / "rows"), **fields)


def test_a_way_for_each_kind_with_the_same_rows_a_step(
    tiny_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_job_module, "_LARGEST_BATCH", 8)
    profiles = {"big": profile("big", flops=1e11), "small": profile("small", gpu=9 << 20)}
    found = plan_job(order(tiny_job, tmp_path, "train.batch=auto", profiles=profiles))
    assert set(found.ways) == {"big", "small"}
    policies = {kind: Policy.model_validate(way.policy) for kind, way in found.ways.items()}
    assert {policy.micro_batch * policy.accumulation for policy in policies.values()} == {found.batch}
    assert found.steps == 5
    option = Option(**found.ways["big"].option)
    assert option.work_tokens == 5 * found.batch * policies["big"].sequence_length
    assert found.ways["small"].device["kind"] == "emulated"
    assert found.ways["small"].device["memory_bytes"] == 9 << 20


def test_a_fixed_batch_stays_and_less_memory_means_a_smaller_part_of_it(tiny_job: Path, tmp_path: Path) -> None:
    full = plan_job(order(tiny_job, tmp_path, "train.batch=4"))
    assert full.ways["big"].policy["micro_batch"] == 4
    just_enough = full.ways["big"].policy["predicted"]["peak_gpu_bytes"]
    profiles = {"small": profile("small", gpu=just_enough)}
    less = plan_job(order(tiny_job, tmp_path, "train.batch=auto", profiles=profiles, batch=4, memory_share=0.85))
    assert less.batch == 4
    assert less.ways["small"].policy["micro_batch"] < 4
    assert less.ways["small"].device["memory_bytes"] == int(0.85 * just_enough)


def test_rows_longer_than_the_model_is_for_are_noted(tiny_job: Path, tmp_path: Path) -> None:
    asked = order(tiny_job, tmp_path)
    assert plan_job(asked).notes == ()
    config = Path(asked.spec["model"]["path"]) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 4}))
    (note,) = plan_alone(asked).notes
    assert "tokens are longer than the 4 that the model is for" in note


def test_what_fits_nowhere_says_what_is_short(tiny_job: Path, tmp_path: Path) -> None:
    found = plan_job(order(tiny_job, tmp_path, "plan.host_memory=1MB"))
    assert found.ways == {}
    assert "of host memory, has" in found.limits["big"]
    assert found.reasons[0]["resource"] == "host_memory"


def test_one_kind_fits_and_the_other_says_why_not(tiny_job: Path, tmp_path: Path) -> None:
    profiles = {"big": profile("big"), "tiny": profile("tiny", gpu=1 << 20)}
    found = plan_job(order(tiny_job, tmp_path, profiles=profiles))
    assert set(found.ways) == {"big"}
    assert "of gpu memory, has" in found.limits["tiny"]


def test_bad_rows_and_a_missing_model_are_found_before_anything_starts(tiny_job: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"nothing": 1}\n')
    with pytest.raises(DataError):
        plan_job(order(tiny_job, tmp_path, f"data.train.0.path={bad}"))
    with pytest.raises(ModelError):
        plan_job(order(tiny_job, tmp_path, f"model.path={tmp_path / 'none'}"))


def test_the_second_job_of_the_same_model_costs_neither_facts_nor_plans(
    tiny_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles = {"big": profile("big"), "small": profile("small", gpu=9 << 20)}
    first = plan_alone(order(tiny_job, tmp_path, profiles=profiles))

    def measured_again(*_: Any, **__: Any) -> None:
        raise AssertionError("it was known")

    monkeypatch.setattr(measuring, "facts_of", measured_again)
    monkeypatch.setattr(plan_job_module, "best_batch", measured_again)
    again = plan_alone(order(tiny_job, tmp_path, "name=again", "train.learning_rate=2e-5", profiles=profiles))
    assert again.ways == first.ways
    with pytest.raises(AssertionError, match="it was known"):
        plan_alone(order(tiny_job, tmp_path, "train.freeze=[lm_head]", profiles=profiles))
    with pytest.raises(AssertionError, match="it was known"):
        plan_alone(order(tiny_job, tmp_path, "plan.gpu_memory=900MB", profiles=profiles))


def test_a_model_with_code_of_its_own_is_measured_each_time(
    tiny_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = order(tiny_job, tmp_path)
    config = {**json.loads((Path(asked.spec["model"]["path"]) / "config.json").read_text()), "auto_map": {"x": "y"}}
    monkeypatch.setattr(measuring, "find_model", lambda *_, **__: config)
    plan_alone(asked)
    assert not (tmp_path / "rows" / "facts").exists()
