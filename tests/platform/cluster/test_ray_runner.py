"""Runs on a real Ray in another process: they go on without whoever started them, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.artifacts import JobFiles
from lazytrain.platform.cluster.ray_runner import RayRunner
from lazytrain.platform.cluster.runs import HOST_LOST, Look, Phase, RunOrder
from lazytrain.platform.planning import facts_of, find_model
from lazytrain.platform.settings import Settings

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
    environment = {**os.environ, "LAZYTRAIN_HOME": str(home), "LAZYTRAIN_RAY_AUTH": "disabled"}
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


def test_it_goes_on_without_its_starter_and_stops_when_asked(
    head: tuple[Settings, str], order: RunOrder, runner: RayRunner
) -> None:
    (machine,) = runner.machines()
    assert (machine.kind, machine.device, machine.gpus) == ("RTX3090", "emulated", 2)
    assert look(runner, order).phase is Phase.ABSENT
    runner.start(order)
    runner.start(order)  # the same claim is not started twice
    wait_for(lambda: look(runner, order).step > 0)
    runner.close()
    other = RayRunner(*head)
    assert other.runs() == {order.claim}
    before = look(other, order)
    wait_for(lambda: look(other, order).step > before.step)
    other.stop(order.claim, order.run_dir)
    wait_for(lambda: look(other, order).phase is Phase.ENDED)
    outcome = look(other, order).outcome
    assert outcome is not None
    assert outcome.how == "stopped"
    assert outcome.step >= before.step
    assert list(JobFiles(order.run_dir).checkpoints.glob("*"))
    wait_for(lambda: other.runs() == set())
    wait_for(lambda: ray.available_resources().get("GPU") == 2)


def test_when_its_actor_is_killed_it_leaves_word_and_nothing_else(runner: RayRunner, order: RunOrder) -> None:
    runner.start(order)
    wait_for(lambda: look(runner, order).step > 0)
    processes = [p for p in psutil.process_iter(["cmdline"]) if str(order.run_dir) in " ".join(p.info["cmdline"] or [])]
    assert len(processes) == 2
    os.kill(ray.get(ray.get_actor(f"run-{order.claim}").pid.remote()), signal.SIGKILL)
    wait_for(lambda: look(runner, order).phase is Phase.ENDED)
    outcome = look(runner, order).outcome
    assert outcome is not None
    assert (outcome.how, outcome.code) == ("died", HOST_LOST)
    assert psutil.wait_procs(processes, timeout=10)[1] == []
