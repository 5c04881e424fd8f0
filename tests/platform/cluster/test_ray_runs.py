"""Real Ray Train runs with one worker, and a real profiling actor."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table

from lazytrain.jobs.errors import HardwareError, InputError, LazytrainError
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.cluster.local import LocalRay
from lazytrain.platform.cluster.port import TrainingOrder
from lazytrain.platform.cluster.profiling import profile_node
from lazytrain.platform.cluster.training import run_training
from lazytrain.platform.demo.machine import base_profile
from lazytrain.platform.models import facts_of, find_model

pytestmark = [pytest.mark.ray, pytest.mark.slow]

KIND = "test-gpu"


def order(job: Path, run_dir: Path, *, length: int = 48, retries: int = 0, steps: int = 3) -> TrainingOrder:
    spec = load_spec(job, (f"train.max_steps={steps}", "train.batch=4", "evaluate.limit=2", "plan.nvme=null"))
    facts = facts_of(find_model(spec.model.path), batch=4, length=length, dtype="float32")
    policy = Policy.from_homes(facts, ["host"] * len(facts.layers) + ["gpu"])
    return TrainingOrder(
        job_id=f"job-{run_dir.parent.name}",
        spec=spec,
        policy=policy,
        device="cpu",
        run_dir=run_dir,
        kind=KIND,
        retries=retries,
    )


def given_back() -> bool:
    """Whether the GPU is free and no placement group is left; Ray may take ten seconds to say so, longer under load."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
        if ray.available_resources().get("GPU") == 1 and not groups:
            return True
        time.sleep(0.1)
    return False


def test_the_workers_own_error_arrives_whole(local_ray: LocalRay, tiny_job: Path, run_dir: Path) -> None:
    with pytest.raises(InputError, match="the policy is for 4 tokens a row") as caught:
        run_training(order(tiny_job, run_dir, length=4), print, cpus=2, stop_timeout_s=10)
    assert "max_length" in caught.value.hint
    assert given_back()


def test_a_worker_that_is_killed_goes_on_from_its_checkpoint(
    local_ray: LocalRay, tiny_job: Path, run_dir: Path
) -> None:
    """SIGKILL at step 4 of 8, a checkpoint after every step: all steps are there once, and the run gives its result."""
    asked = order(tiny_job, run_dir, retries=1, steps=8)
    every = asked.spec.output.model_copy(update={"save_every": 1})
    asked = TrainingOrder(**{**vars(asked), "spec": asked.spec.model_copy(update={"output": every})})
    heard: list[float] = []
    killed: list[int] = []

    def kill(record: Mapping[str, float]) -> None:
        if "loss" in record:
            heard.append(record["step"])
        if record["step"] >= 4 and not killed:
            killed.append(worker_pid())
            os.kill(killed[0], signal.SIGKILL)

    result = run_training(asked, kill, cpus=2, stop_timeout_s=10)
    assert (result.status, result.steps) == ("done", 8)
    assert result.exact_match is not None
    assert killed
    assert heard == list(range(1, 9))
    assert given_back()


def worker_pid() -> int:
    """The training process among those that this test started: another Ray may run on this machine."""
    (worker,) = [p for p in psutil.Process().children(recursive=True) if "RayTrainWorker" in " ".join(p.cmdline())]
    return int(worker.pid)


def test_ctrl_c_lets_the_worker_save_and_gives_everything_back(
    local_ray: LocalRay, tiny_job: Path, run_dir: Path
) -> None:
    def interrupt(record: Mapping[str, Any]) -> None:
        if "loss" in record:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(order(tiny_job, run_dir, steps=500), interrupt, cpus=2, stop_timeout_s=30)
    assert list((run_dir / "checkpoints").glob("*"))
    assert given_back()


def test_a_node_that_is_not_there(local_ray: LocalRay, tiny_job: Path, run_dir: Path) -> None:
    asked = TrainingOrder(**{**vars(order(tiny_job, run_dir)), "kind": "H800"})
    with pytest.raises(HardwareError, match="H800"):
        run_training(asked, print, cpus=2, stop_timeout_s=10)


def test_an_actor_measures_the_node_and_leaves(local_ray: LocalRay, tmp_path: Path) -> None:
    profile = profile_node(base_profile(), tmp_path, cpus=2, kind=KIND, reserve_bytes=0, timeout_s=120)
    assert profile.device == "emulated"
    assert profile.matmul_flops["float32"] != base_profile().matmul_flops["float32"]
    assert given_back()


def test_a_profiling_actor_that_does_not_answer_is_an_error(local_ray: LocalRay, tmp_path: Path) -> None:
    with pytest.raises(LazytrainError, match=r"did not answer within 0\.01 s"):
        profile_node(base_profile(), tmp_path, cpus=2, kind=KIND, reserve_bytes=0, timeout_s=0.01)
    assert given_back()
