"""Nodes are checked when they join, and while they are there (cases U72, U76, U77, U78)."""

from dataclasses import replace
from typing import Any

import pytest

from lazytrain.jobs.errors import DeviceBusy
from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.cluster.runs import NodeReport, Phase
from lazytrain.schedulers.copies import CopyRates
from lazytrain.schedulers.hardware import MEASUREMENT, hardware

S = JobState
World = Any
VERSIONS = {"python": "3.11.7", "lazytrain": "0.1.0", "ray": "2.60.0", "torch": "2.13.0"}


def measured(**changes: Any) -> dict[str, Any]:
    """The profile of a node that was just measured."""
    return hardware("H800").model_copy(update={"measurement": MEASUREMENT, **changes}).model_dump(mode="json")


def device(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"GPU-{number}", "index": number, "pcie_root": f"pci0000:0{number // 2}/port", "busy": "", **fields}


@pytest.fixture
def lab(world: World) -> World:
    world.config = replace(world.config, head=NodeReport(versions=VERSIONS, token="t"))
    world.new_controller()
    return world


def report(lab: World, name: str = "a", **changes: Any) -> None:
    lab.runner.reports[name] = NodeReport(**{"versions": VERSIONS, "token": "t", "devices": (device(0),), **changes})


def test_a_node_like_the_head_is_used(lab: World) -> None:
    report(lab)
    job = lab.submit()
    lab.steps(3)
    assert lab.state(job) is S.STARTING
    assert lab.job(job).gpu == "GPU-0"  # what the driver calls it, not a number
    assert lab.runner.started[0].gpu == "GPU-0"


def test_until_it_has_answered_it_takes_no_job(lab: World) -> None:
    lab.runner.reports["a"] = None
    job = lab.submit()
    lab.steps(5)
    assert lab.state(job) is S.QUEUED
    report(lab)
    lab.steps(3)
    assert lab.state(job) is S.STARTING


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": {**VERSIONS, "ray": "2.59.0"}}, "ray is 2.59.0 there and 2.60.0 here"),
        ({"versions": {**VERSIONS, "lazytrain": "0.2.0"}}, "lazytrain is 0.2.0 there"),
        ({"versions": {**VERSIONS, "torch": "2.12.1"}}, "torch is 2.12.1 there"),
        ({"versions": {**VERSIONS, "python": "3.12.1"}}, "python is 3.12.1 there"),
        ({"versions": {**VERSIONS, "torch": ""}}, "torch is not installed there"),
        ({"token": ""}, "does not see the head's folder"),
        ({"token": "old"}, "does not see the head's folder"),
    ],
)
def test_another_one_is_not_and_says_why(lab: World, changes: dict[str, Any], words: str) -> None:
    report(lab, **changes)
    job = lab.submit()
    lab.steps(5)
    assert lab.state(job) is S.QUEUED
    assert words in lab.store.nodes.get("a").problem
    report(lab)  # somebody has repaired it
    lab.steps(2, seconds=lab.config.inspect_every_s)
    lab.steps(3)
    assert lab.state(job) is S.STARTING


def test_a_patch_level_is_only_a_warning(lab: World) -> None:
    report(lab, versions={**VERSIONS, "python": "3.11.9"})
    job = lab.submit()
    lab.steps(3)
    assert lab.state(job) is S.STARTING
    assert lab.store.nodes.get("a").checked["warning"] == "python is 3.11.9 there and 3.11.7 here"


def test_ray_counts_more_gpus_than_the_driver(lab: World) -> None:
    lab.add_machine("a", gpus=2)
    report(lab)
    lab.steps(2)
    assert "Ray counts 2 GPUs and the driver 1: start the node with --num-gpus 1" in lab.store.nodes.get("a").problem


def test_a_gpu_that_something_else_uses_is_not_given_away(lab: World) -> None:
    lab.add_machine("a", gpus=2)
    report(lab, devices=(device(0), device(1)))
    lab.steps(2)
    report(lab, devices=(device(0, busy="20GiB of it are in use by something else"), device(1)))
    lab.steps(2, seconds=lab.config.inspect_every_s)
    first, second = lab.submit(), lab.submit()
    lab.steps(3)
    assert (lab.state(first), lab.job(first).gpu) == (S.STARTING, "GPU-1")
    assert lab.state(second) is S.QUEUED
    report(lab, devices=(device(0), device(1)))
    lab.steps(2, seconds=lab.config.inspect_every_s)
    assert (lab.state(second), lab.job(second).gpu) == (S.STARTING, "GPU-0")


def test_a_node_is_not_measured_while_something_uses_it(lab: World) -> None:
    report(lab, devices=(device(0, busy="20GiB of it are in use by something else"),))
    job = lab.submit()
    lab.steps(3)
    assert not lab.store.nodes.get("a").profile
    assert lab.state(job) is S.QUEUED


def test_an_old_profile_is_measured_again_once_the_node_is_idle(lab: World) -> None:
    """Until then it has to do: a lab does not stand still because it was upgraded."""
    report(lab, devices=())
    lab.runner.there["a"] = replace(lab.runner.there["a"], gpus=2)
    lab.steps(2)
    lab.store.nodes.set_profile("a", measured(measurement=1))
    lab.runner.profiles["a"] = None
    first = lab.submit()
    lab.steps(3)
    assert lab.state(first) is S.QUEUED
    assert "it is being measured" in str(lab.questions[-1].nodes[0].excluded)
    lab.runner.profiles["a"] = measured()
    lab.running(first)
    lab.store.nodes.set_profile("a", measured(measurement=1))
    second = lab.submit()
    lab.running(second)
    assert lab.store.nodes.get("a").profile["measurement"] == 1  # it is in use
    lab.finish(first)
    lab.finish(second)
    lab.steps(4)
    assert lab.store.nodes.get("a").measured


@pytest.mark.parametrize("changes", [{"driver": "580.2"}, {"id": "GPU-9"}])
def test_another_driver_or_another_gpu_is_measured_again(lab: World, changes: dict[str, Any]) -> None:
    report(lab, devices=(device(0, driver="580.1"),))
    lab.runner.profiles["a"] = measured(driver="580.1", copies=(copy_rates("GPU-0"),))
    lab.steps(2)
    assert lab.store.nodes.get("a").measured
    report(lab, devices=(device(0, **{"driver": "580.1", **changes}),))
    new = device(0, **{"driver": "580.1", **changes})
    lab.runner.profiles["a"] = measured(driver=new["driver"], copies=(copy_rates(new["id"]),))
    lab.steps(1, seconds=lab.config.inspect_every_s)
    node = lab.store.nodes.get("a")
    assert node.measured
    assert (node.profile["driver"], node.profile["copies"][0]["gpu"]) == (new["driver"], new["id"])


def test_a_gpu_that_turns_out_to_be_busy_is_measured_later(lab: World) -> None:
    report(lab)
    lab.runner.profiles["a"] = DeviceBusy("GPU 0 is not measured while it is busy: 3GiB of it are in use")
    lab.steps(3)
    node = lab.store.nodes.get("a")
    assert (bool(node.profile), node.drained) == (False, False)
    lab.store.nodes.set_profile("a", measured(measurement=1))
    report(lab, devices=(device(0, busy="3GiB of it are in use"),))
    lab.submit()
    lab.steps(2, seconds=lab.config.inspect_every_s)
    assert "not measured while GPU 0 is busy: 3GiB" in lab.questions[-1].nodes[0].excluded
    report(lab)
    lab.runner.profiles["a"] = measured()
    lab.steps(2, seconds=lab.config.inspect_every_s)
    assert lab.store.nodes.get("a").measured


def test_what_gpus_share_is_what_they_reached_at_once(lab: World) -> None:
    report(lab, devices=(device(0), device(1)))
    lab.runner.there["a"] = replace(lab.runner.there["a"], gpus=2)
    slow = {name: 30e9 for name in CopyRates.model_fields if name.startswith("all_")}
    copies = tuple(copy_rates(f"GPU-{number}", **slow) for number in (0, 1))
    lab.runner.profiles["a"] = measured(copies=copies, host_bytes_s=90e9)
    lab.steps(2)
    lab.submit()
    lab.steps(2)
    (node,) = lab.questions[-1].nodes
    assert (node.h2d_bytes_s, node.d2h_bytes_s, node.copies_bytes_s) == (60e9, 60e9, 120e9)
    assert node.pcie_bytes_s == 60e9  # both hang on one root
    assert node.dram_bytes_s == 120e9  # so much has passed it


def copy_rates(gpu: str, **changes: float) -> CopyRates:
    rates = {name: 50e9 for name in CopyRates.model_fields if name.endswith("_bytes_s")}
    return CopyRates(gpu=gpu, **{**rates, **changes})


def test_a_gpu_that_was_busy_after_all_uses_up_no_retry(lab: World) -> None:
    report(lab)
    job = lab.submit(queue={"retries": 0})
    for _ in range(3):
        lab.running(job)
        lab.end(job, how="error", code="gpu_busy", message="the GPU has 3GiB free")
        lab.steps(2)
        assert lab.state(job) is S.QUEUED
        lab.steps(1, seconds=40)
    assert (lab.job(job).infra_failures, lab.job(job).user_failures, lab.job(job).replans) == (0, 0, 0)


def test_a_gpu_whose_name_has_changed_under_a_job_stays_taken(lab: World) -> None:
    report(lab, devices=())
    job = lab.submit()
    lab.running(job)
    assert lab.job(job).gpu == "0"
    report(lab)
    lab.steps(3, seconds=lab.config.inspect_every_s)
    assert lab.state(job) is S.RUNNING
    other = lab.submit()
    lab.steps(3)
    assert lab.state(other) is S.QUEUED
    assert lab.run(job).phase is Phase.RUNNING
