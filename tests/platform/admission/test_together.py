"""Planning for a node that jobs share, with the real planner."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.admission import AdmissionOrder, Way
from lazytrain.platform.admission.measuring import Here
from lazytrain.platform.admission.plan_job import plan_job
from lazytrain.platform.admission.together import plan_beside
from lazytrain.platform.demo.machine import base_profile
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.placement import Gpu, NodeState, Option
from lazytrain.schedulers.placement.sharing import speeds

GIB = 1 << 30


@pytest.fixture
def machine() -> HardwareProfile:
    """A GPU that computes fast beside a link that is slow."""
    changes = {"gpu_memory_bytes": GIB, "host_memory_bytes": 8 * GIB, "matmul_flops": {"float32": 1e12}}
    return base_profile().model_copy(update={**changes, "h2d_bytes_s": 2e8, "d2h_bytes_s": 2e8, "kind": "big"})


def test_jobs_under_one_root_are_planned_for_their_part_of_it(
    tiny_job: Path, tmp_path: Path, machine: HardwareProfile
) -> None:
    spec = load_spec(tiny_job, ("plan.nvme=null", "train.max_steps=5", "train.batch=4")).model_dump(mode="json")
    cache = str(tmp_path / "rows")
    profile = machine.model_dump(mode="json")
    here = Here(tmp_path / "facts")
    alone = plan_job(AdmissionOrder(job="j-1", spec=spec, profiles={"big": profile}, cache=cache), here)
    option = Option(**alone.ways["big"].option)
    gpus = (Gpu(id="0", pcie_root="r"), Gpu(id="1", pcie_root="r"))
    node = NodeState(name="n", kind="big", gpus=gpus, host_bytes=8 * GIB, pcie_bytes_s=2e8)
    assert min(speeds([(option, "r")] * 2, node)) < 0.99

    starting = {"spec": spec, "cache": cache, "memory_share": 1.0, "batch": 4, "root": "r", "host_bytes": GIB}
    asked: dict[str, Any] = {"profile": profile, "node": asdict(node), "starting": [starting]}
    found = plan_beside({**asked, "beside": [{"option": asdict(option), "root": "r"}]}, here)
    (way,) = (Way.model_validate(one) for one in found["ways"])
    assert Option(**way.option).work_tokens == option.work_tokens
    assert Policy.model_validate(way.policy).micro_batch * Policy.model_validate(way.policy).accumulation == 4
    assert way.device == alone.ways["big"].device
    assert found["tokens_per_s"][0] < 0.99 * option.tokens_per_s
    assert plan_beside({**asked, "beside": []}, here)["tokens_per_s"] == [pytest.approx(option.tokens_per_s)]


def test_a_job_that_fits_only_alone_has_no_joint_plan(tiny_job: Path, tmp_path: Path, machine: HardwareProfile) -> None:
    spec = load_spec(tiny_job, ("plan.nvme=null", "train.max_steps=5", "train.batch=4")).model_dump(mode="json")
    taken = Option(kind="big", tokens_per_s=1.0, work_tokens=0.0, host_bytes=8 * GIB - 1)
    node = NodeState(name="n", kind="big", gpus=(Gpu(id="0"), Gpu(id="1")), host_bytes=8 * GIB)
    starting = {"spec": spec, "cache": str(tmp_path), "memory_share": 1.0, "batch": 4, "root": "", "host_bytes": GIB}
    asked: dict[str, Any] = {"profile": machine.model_dump(mode="json"), "node": asdict(node), "starting": [starting]}
    asked["beside"] = [{"option": asdict(taken), "root": ""}]
    assert plan_beside(asked, Here(tmp_path / "facts")) == {"ways": [], "tokens_per_s": []}
