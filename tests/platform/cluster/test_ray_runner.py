"""Runs on a real Ray in another process: they go on without whoever started them, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from lazytrain.jobs.errors import LazytrainError
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.artifacts import JobFiles, read_json
from lazytrain.platform.cluster.elsewhere import Elsewhere
from lazytrain.platform.cluster.ray_runner import RayRunner
from lazytrain.platform.cluster.runs import HOST_LOST, Look, NodeReport, Phase, RunOrder
from lazytrain.platform.cluster.survey import Witness
from lazytrain.platform.inspection import versions
from lazytrain.platform.models import facts_of, find_model
from lazytrain.platform.settings import Settings
from lazytrain.schedulers.hardware import MEASUREMENT, HardwareProfile, hardware

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def wait_for(what: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Settings, str]]:
    home = tmp_path_factory.mktemp("home")
    address = home / "address"
    command = [sys.executable, "-m", "lazytrain.platform.cluster.head", str(address), "RTX3090", "emulated", "2", "2"]
    environment = {
        **os.environ,
        "LAZYTRAIN_HOME": str(home),
        "LAZYTRAIN_RAY_AUTH": "disabled",
        "LAZYTRAIN_PROBE_S": "0.2",
    }
    process = subprocess.Popen(command, env=environment)
    wait_for(address.exists)
    yield Settings(home=home, ray_auth="disabled"), address.read_text()
    process.terminate()
    process.wait(30)


@pytest.fixture
def runner(head: tuple[Settings, str]) -> Iterator[RayRunner]:
    made = RayRunner(*head)
    yield made
    for claim in made.runs():
        made.kill(claim)
    made.close()


@pytest.fixture
def order(tiny_job: Path, tmp_path: Path, runner: RayRunner) -> RunOrder:
    spec = load_spec(
        tiny_job,
        ("train.max_steps=100000", "train.epochs=10000", "train.batch=4", "evaluate.limit=2", "plan.nvme=null"),
    )
    facts = facts_of(find_model(spec.model.path), batch=4, length=48, dtype="float32")
    policy = Policy.from_homes(facts, ["host"] * len(facts.layers) + ["gpu"])
    return RunOrder(
        job="j-0000000001",
        claim=f"j-0000000001-{tmp_path.name[-4:]}",
        attempt=1,
        spec=spec.model_dump(mode="json"),
        policy=policy.model_dump(mode="json", by_alias=True),
        device={"kind": "emulated", "memory_bytes": 1 << 30},
        run_dir=tmp_path / "run",
        node=runner.machines()[0].name,
        gpu="0",
        cpus=1,
    )


def look(runner: RayRunner, order: RunOrder) -> Look:
    return runner.look(order.claim, order.run_dir, order.attempt)


def of_run(order: RunOrder) -> list[psutil.Process]:
    """Keeper and training process."""
    every = psutil.process_iter(["cmdline"])
    return [p for p in every if str(order.run_dir) in " ".join(p.info["cmdline"] or [])]


def free_gpus() -> float:
    return float(ray.available_resources().get("GPU", 0))


def test_it_goes_on_without_its_starter_gives_its_gpu_up_while_it_is_paused_and_stops_when_asked(
    head: tuple[Settings, str], order: RunOrder, runner: RayRunner
) -> None:
    (machine,) = runner.machines()
    assert (machine.kind, machine.device, machine.gpus) == ("RTX3090", "emulated", 2)
    assert look(runner, order).phase is Phase.ABSENT
    runner.start(order)
    runner.start(order)  # the same claim is not started twice
    wait_for(lambda: look(runner, order).step > 0)
    assert free_gpus() == 1
    runner.close()
    other = RayRunner(*head)
    assert other.runs() == {order.claim}
    before = look(other, order)
    wait_for(lambda: look(other, order).step > before.step)
    assert_its_gpu_is_somebody_elses_while_it_is_paused(other, order)
    other.stop(order.claim, order.run_dir)
    wait_for(lambda: look(other, order).phase is Phase.ENDED)
    outcome = look(other, order).outcome
    assert outcome is not None
    assert outcome.how == "stopped"
    assert outcome.step >= before.step
    assert list(JobFiles(order.run_dir).checkpoints.glob("*"))
    wait_for(lambda: other.runs() == set())
    wait_for(lambda: free_gpus() == 2)


def assert_its_gpu_is_somebody_elses_while_it_is_paused(runner: RayRunner, order: RunOrder) -> None:
    """Of a run that trains; it does so again afterwards, in the same process."""
    (process,) = [p for p in of_run(order) if "keeper.py" not in " ".join(p.info["cmdline"])]
    runner.pause(order.claim, order.run_dir)
    wait_for(lambda: look(runner, order).phase is Phase.PAUSED)
    wait_for(lambda: free_gpus() == 2)
    at = look(runner, order).step
    assert process.is_running()
    assert runner.runs() == {order.claim}
    runner.resume(order.claim, order.run_dir)
    runner.resume(order.claim, order.run_dir)
    wait_for(lambda: look(runner, order).phase is Phase.RUNNING and look(runner, order).step > at)
    wait_for(lambda: free_gpus() == 1)
    assert process.is_running()


def test_whoever_loses_its_hold_on_the_gpu_does_not_train_on(runner: RayRunner, order: RunOrder) -> None:
    runner.start(order)
    wait_for(lambda: look(runner, order).step > 0)
    host = ray.get_actor(f"run-{order.claim}")
    os.kill(ray.get(host.hold_pid.remote()), signal.SIGKILL)
    wait_for(lambda: look(runner, order).phase is Phase.ENDED)
    outcome = look(runner, order).outcome
    assert outcome is not None
    assert outcome.code == HOST_LOST
    wait_for(lambda: free_gpus() == 2)


def test_a_node_says_what_it_is(runner: RayRunner, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    name = runner.machines()[0].name
    found: list[NodeReport] = []

    def answered() -> bool:
        report = runner.inspect(name, token)
        found.extend([report] if report is not None else [])
        return bool(found)

    wait_for(answered)
    assert found[0].token == "t"
    assert found[0].versions == versions()


def test_all_gpus_of_a_node_are_measured_at_once(runner: RayRunner, tmp_path: Path) -> None:
    name = runner.machines()[0].name
    found: list[Mapping[str, Any]] = []

    def answered() -> bool:
        profile = runner.measure(name)
        found.extend([profile] if profile is not None else [])
        return bool(found)

    wait_for(answered)
    profile = HardwareProfile.model_validate(found[0])
    assert (profile.measurement, [each.gpu for each in profile.copies]) == (MEASUREMENT, ["0", "1"])
    limit = hardware("RTX3090").h2d_bytes_s
    for each in profile.copies:
        rates = [value for value in vars(each).values() if isinstance(value, float)]
        assert len(rates) == 8 and all(1e6 < rate <= limit for rate in rates)
    assert profile.h2d_bytes_s == min(each.h2d_bytes_s for each in profile.copies)
    wait_for(lambda: free_gpus() == 2)


def test_the_batch_is_searched_on_the_node_and_then_trained_with(runner: RayRunner, order: RunOrder) -> None:
    profile = hardware("RTX3090").model_copy(update={"device": "emulated", "gpu_memory_bytes": 1 << 28})
    rows = Path(order.spec["data"]["train"][0]["path"])
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:2]))  # no batch is larger: fewer to try
    train = {**order.spec["train"], "batch": "auto"}
    search = {"profile": profile.model_dump(mode="json"), "kind": "RTX3090", "memory_share": 1.0}
    plan = {**order.spec["plan"], "planner": "every_layer"}  # is quick, and every batch fits by it
    asked = replace(order, spec={**order.spec, "train": train, "plan": plan}, search=search)
    runner.start(asked)
    files = JobFiles(asked.run_dir)
    wait_for(files.batch.exists, 200)
    found = read_json(files.batch)
    assert found is not None
    fits = [trial for trial in found["trials"] if trial["fits"]]
    assert 1 <= len(found["trials"]) <= 4
    assert found["batch"] in [trial["batch"] for trial in fits]
    assert all(trial["steps"] > 0 for trial in fits)
    assert len({trial["pid"] for trial in fits}) == len(fits)
    wait_for(lambda: look(runner, asked).step > 0)
    assert free_gpus() == 1
    trained = read_json(files.attempt(1).order)
    assert trained is not None
    assert (trained["spec"]["train"]["batch"], trained["policy"]) == (found["batch"], found["way"]["policy"])
    runner.kill(asked.claim)
    wait_for(lambda: look(runner, asked).phase is Phase.ENDED)


def test_when_its_actor_is_killed_it_leaves_word_and_nothing_else(runner: RayRunner, order: RunOrder) -> None:
    runner.start(order)
    wait_for(lambda: look(runner, order).step > 0)
    processes = of_run(order)
    assert len(processes) == 2
    os.kill(ray.get(ray.get_actor(f"run-{order.claim}").pid.remote()), signal.SIGKILL)
    wait_for(lambda: look(runner, order).phase is Phase.ENDED)
    outcome = look(runner, order).outcome
    assert outcome is not None
    assert (outcome.how, outcome.code) == ("died", HOST_LOST)
    assert psutil.wait_procs(processes, timeout=10)[1] == []


def test_an_object_elsewhere_answers_is_made_again_and_gives_its_memory_back(
    head: tuple[Settings, str], tmp_path: Path
) -> None:
    there = Elsewhere(*head, Witness)
    found, sees = there.ask("answer", str(tmp_path), ["ray"])
    assert (found["ray"], sees) == (versions()["ray"], True)
    ray.kill(there._actor)  # as a node's memory monitor would
    assert there.ask("now") > 0
    with pytest.raises(LazytrainError, match=r"answer failed on node .*: TypeError"):
        there.ask("answer", None, [])
    there.release()
    assert there._actor is None
    assert there._connection is not None
    there._connection.close()
