"""A run that is given another policy while it trains: it takes it up between two steps, with the same curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.executor import Emulated
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.run_directory import RunDirectory
from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.tracking import read_metrics
from lazytrain.jobs.train import train

GPU = Emulated(memory_bytes=1 << 26)


def losses(folder: Path) -> list[Any]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(m["step"], m.get("loss"), m.get("eval_loss"), m.get("grad_norm")) for m in rows]


def train_and_leave(job: Path, text_of: Any) -> RunDirectory:
    """Train in ``b``; after step 3 there is a next policy, made by ``text_of`` from the one that runs."""
    directory = RunDirectory(job.parent / "b")
    left: list[float] = []

    def progress(record: Any) -> None:
        if record["step"] == 3 and not left:
            left.append(record["step"])
            directory.next_policy.write_text(text_of(Policy.load(directory.policy)))

    assert train(load_spec(job, ["output.dir=b"]), device=GPU, progress=progress).status == "done"
    assert left
    assert not directory.next_policy.exists()
    assert losses(job.parent / "b") == losses(job.parent / "a")
    return directory


def on_gpu(policy: Policy) -> Policy:
    boundaries = tuple(boundary.model_copy(update={"home": "gpu"}) for boundary in policy.boundaries)
    return policy.model_copy(update={"boundaries": boundaries})


@pytest.fixture(autouse=True)
def undisturbed_run(job: Path) -> None:
    train(load_spec(job, ["output.dir=a"]), device=GPU)


def test_it_is_taken_up_and_the_curve_is_the_same(job: Path) -> None:
    directory = train_and_leave(job, lambda policy: on_gpu(policy).model_dump_json(by_alias=True))
    assert set(Policy.load(directory.policy).homes) == {"gpu"}


@pytest.mark.parametrize(
    "text_of",
    [
        lambda policy: "{",
        lambda policy: on_gpu(policy).model_copy(update={"model_digest": "another"}).model_dump_json(by_alias=True),
        lambda policy: on_gpu(policy).model_copy(update={"weight_slots": 10**4}).model_dump_json(by_alias=True),
    ],
    ids=["no policy", "for another model", "without room"],
)
def test_what_cannot_be_taken_up_is_left(job: Path, text_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    directory = train_and_leave(job, text_of)
    assert set(Policy.load(directory.policy).homes) != {"gpu"}
    assert "the run goes on as before" in caplog.text
