"""The training process of a run, in this process: what it says of itself, however it ends."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs import train as train_module
from lazytrain.jobs.errors import CheckpointError, DataError, NonFiniteGradient, OutOfMemory
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.artifacts import AttemptFiles, JobFiles, read_json, write_json
from lazytrain.platform.cluster.run_process import Pulse, main
from lazytrain.platform.cluster.runs import RunOrder
from lazytrain.platform.models import facts_of, find_model


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def order(tiny_job: Path, tmp_path: Path) -> RunOrder:
    spec = load_spec(tiny_job, ("train.max_steps=3", "train.batch=4", "evaluate.limit=2", "plan.nvme=null"))
    return RunOrder(
        job="j-0000000001",
        claim="c",
        attempt=1,
        spec=spec.model_dump(mode="json"),
        policy={},
        device={"kind": "emulated", "memory_bytes": 1 << 30},
        run_dir=tmp_path / "run",
        node="a",
        gpu="0",
        cpus=1,
    )


def run(order: RunOrder) -> tuple[int, dict[str, Any]]:
    files = JobFiles(order.run_dir).attempt(order.attempt)
    write_json(files.order, order.to_dict())
    code = main(files.order)
    outcome = read_json(files.outcome)
    assert outcome is not None
    assert outcome["exit_code"] == code
    beat = read_json(files.beat)
    assert beat is not None
    assert beat["beat"] >= 1
    assert outcome["step"] == beat["step"]
    return code, outcome


def test_a_run_that_is_done_or_asked_to_stop_before(order: RunOrder) -> None:
    model = find_model(order.spec["model"]["path"])
    facts = facts_of(model, batch=4, length=48, dtype="float32")
    policy = Policy.from_homes(facts, ["host"] * len(facts.layers) + ["gpu"])
    order = RunOrder.from_dict({**order.to_dict(), "policy": policy.model_dump(mode="json", by_alias=True)})
    order.run_dir.mkdir()
    (order.run_dir / "stop").touch()
    assert run(order)[1]["how"] == "stopped"
    (order.run_dir / "stop").unlink()
    code, outcome = run(order)
    assert (code, outcome["how"], outcome["step"]) == (0, "done", 3)
    assert outcome["result"] == read_json(JobFiles(order.run_dir).result)
    assert outcome["loss"] == outcome["result"]["loss"]


@pytest.mark.parametrize(
    ("error", "code", "final", "exit_code"),
    [
        (DataError("line 7 has no answer", hint="look"), "invalid_data", True, 2),
        (NonFiniteGradient("ten steps in a row"), "non_finite", True, 1),
        (CheckpointError("of another run"), "invalid_checkpoint", True, 1),
        (OutOfMemory(tier="gpu", requested_bytes=3, used_bytes=8, budget_bytes=10), "out_of_memory", False, 1),
        (MemoryError(), "out_of_memory", False, 1),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"), "out_of_memory", False, 1),
        (KeyError("x"), "unexpected", False, 1),
    ],
)
def test_errors_in_its_own_words(
    order: RunOrder,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
    code: str,
    final: bool,
    exit_code: int,
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        options["progress"]({"step": 2.0, "total_steps": 3.0, "loss": float("nan")})
        raise error

    monkeypatch.setattr(train_module, "train", fail)
    monkeypatch.setattr(Policy, "model_validate", lambda values: None)
    got, outcome = run(order)
    assert (got, outcome["how"], outcome["code"], outcome["final"]) == (exit_code, "error", code, final)
    assert (outcome["step"], outcome["loss"], outcome["node"]) == (2, None, "a")
    assert outcome["message"]
    assert ("Traceback" in capfd.readouterr().err) is (code == "unexpected" or "CUDA" in str(error))


def test_a_pulse_outlives_a_full_disk(tmp_path: Path) -> None:
    files = AttemptFiles(tmp_path / "there" / "0001")
    (tmp_path / "there").touch()  # no folder can be made
    pulse = Pulse(files)
    pulse.told(paused=True)
    (tmp_path / "there").unlink()
    pulse.hear({"step": 3, "total_steps": 9, "loss": float("inf")})
    pulse.stop()
    beat = read_json(files.beat)
    assert beat is not None
    assert (beat["step"], beat["paused"], pulse.loss) == (3, True, None)  # no record can hold another loss
