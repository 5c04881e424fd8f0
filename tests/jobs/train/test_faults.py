"""One run that is killed at every point where a kill could hurt, and still ends in the bits of one that never was."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lazytrain.jobs.checkpoint import CheckpointStore
from lazytrain.jobs.errors import CheckpointError
from lazytrain.jobs.executor import Emulated
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.tracking import read_metrics
from lazytrain.jobs.train import train

SHORT = ["train.epochs=3", "data.split={train: 0.4, eval: 0.1, seed: 1}", "evaluate.limit=1", "output.save_every=1"]
"""15 steps in three epochs, a save after each."""

KILLS = [
    ("claimed", 1), ("loaded", 1), ("prepared", 1), ("rehearsed", 1), ("forward", 2), ("backward", 2), ("step", 3),
    ("stepped", 2), ("resumed", 1), ("evaluating", 1), ("saving", 2), ("start", 1), ("unit model.layers.1", 2),
    ("trainer", 1), ("manifest", 2), ("synced", 1), ("renamed", 1), ("published", 1), ("removing", 1), ("removed", 1),
    ("done", 1), ("exporting", 1), ("exported", 1), ("result", 1),
]  # fmt: skip
"""Points of `train` and of `CheckpointStore`, and which time they come by: always in a process that goes on from the
one before."""

STOPS = [("forward", 2), ("backward", 2), ("step", 1), ("evaluating", 1), ("saving", 1), ("unit model.layers.1", 1)]

PARKED_KILLS = [
    ("stepped", 2), ("backward", 2), ("start", 1), ("unit model.layers.1", 2), ("manifest", 1), ("published", 1),
    ("removing", 1), ("done", 1),
]  # fmt: skip
"""For runs with optimizer state on NVMe, of which nothing is left after a kill: they go on from the checkpoint."""

GPU = Emulated(memory_bytes=1 << 28, h2d_bytes_s=1e9)

ATTEMPTS = """
import os, signal, sys, functools, json
import torch
torch.set_num_threads(1)
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.train import setup, train

@functools.cache
def facts(**shape):
    return original(models[0], **shape)

original, models = setup.model_facts, []
setup.model_facts = lambda model, **shape: (models.append(model), facts(**shape))[1]

job, overrides, kills, parked = json.loads(sys.argv[1])
spec = load_spec(job, overrides)
policy = Policy.load(parked).parked(optimizer=[0, 1, 2]) if parked else None
setup.set_up(spec, None, setup.RunDirectory(__import__("pathlib").Path(spec.output.dir + "-facts")), lambda name: None)
for point, times in [*kills, (None, 0)]:
    child = os.fork()
    if child == 0:
        seen = []
        def on_point(name):
            seen.append(name)
            if point and name.startswith(point) and sum(n.startswith(point) for n in seen) == times:
                os.kill(os.getpid(), signal.SIGKILL)
        code = 1
        try:
            train(spec, device="cpu", on_point=on_point, policy=policy)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed if point else status == 0, (point, status)
"""


def states(run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a run's newest checkpoint: weights, optimizer states, buffers."""
    checkpoint = CheckpointStore(run / "checkpoints").latest()
    assert checkpoint is not None
    return {f"{unit}/{name}": tensor for unit in checkpoint.units for name, tensor in checkpoint.unit(unit).items()}


def assert_same_end(run: Path, whole: Path) -> None:
    """Weights, states, and what was reported, are those of the run that nobody disturbed."""
    mine, other = states(run), states(whole)
    assert mine.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in mine.items())
    for metric in ("loss", "learning_rate", "eval_loss"):
        reported = [
            [(row["step"], row[metric]) for row in read_metrics(r / "metrics.jsonl") if metric in row]
            for r in (run, whole)
        ]
        assert reported[0] == reported[1]
    results = [json.loads((r / "result.json").read_text()) for r in (run, whole)]
    for key in ("status", "steps", "loss", "exact_match_before", "exact_match", "best_step", "best_eval_loss"):
        assert results[0][key] == results[1][key]
    assert (run / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()
    assert not [path for path in run.iterdir() if path.name.startswith(".model")]


@pytest.fixture(scope="module")
def whole(undisturbed: Path) -> Path:
    train(load_spec(undisturbed, [*SHORT, "output.dir=whole"]), device="cpu")
    return undisturbed.parent / "whole"


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "parked"), [(KILLS, False), (PARKED_KILLS, True)], ids=["host", "state-on-nvme"])
def test_killed_at_every_point_and_still_the_same_bits(
    job: Path, whole: Path, kills: list[tuple[str, int]], parked: bool
) -> None:
    settings = [*SHORT, f"plan.nvme={job.parent}"]
    given = json.dumps([str(job), settings, kills, str(whole / "policy.json") if parked else None])
    subprocess.run([sys.executable, "-c", ATTEMPTS, given], check=True, timeout=200)
    assert_same_end(job.parent / "run", whole)


@pytest.mark.parametrize(
    ("device", "parked"), [("cpu", []), (GPU, []), (GPU, [0, 1, 2])], ids=["cpu", "emulated", "state-on-nvme"]
)
def test_asked_to_stop_anywhere_and_still_the_same_bits(
    job: Path, whole: Path, device: str | Emulated, parked: list[int]
) -> None:
    """What SIGTERM does: the run gives the step up at the next layer, saves the state before it, and ends."""
    spec = load_spec(job, [*SHORT, f"plan.nvme={job.parent}"])
    policy = Policy.load(whole / "policy.json").parked(optimizer=parked) if parked else None
    for point, times in STOPS:
        asked: list[str] = []
        stopped = train(
            spec,
            device=device,
            policy=policy,
            on_point=lambda name, point=point, asked=asked: asked.append(name) if name.startswith(point) else None,
            stop=lambda asked=asked, times=times: len(asked) >= times,
        )
        assert len(asked) >= times
        assert stopped.status == "stopped"
        checkpoint = CheckpointStore(job.parent / "run" / "checkpoints").latest()
        assert stopped.steps == 0 if checkpoint is None else checkpoint.step == stopped.steps
    assert train(spec, device=device, policy=policy).status == "done"
    assert_same_end(job.parent / "run", whole)


def test_a_full_disk_ends_the_run_and_more_room_lets_it_go_on(
    job: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(job, SHORT)
    write, calls, store = os.write, [], CheckpointStore(job.parent / "run" / "checkpoints")

    def full(descriptor: int, part: memoryview) -> int:
        calls.extend([len(part)] if store.all() else [])
        if len(calls) > 5:  # in the middle of the second checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, part)

    with monkeypatch.context() as disk:
        disk.setattr("lazytrain.jobs.checkpoint.files.os.write", full)
        with pytest.raises(CheckpointError, match="disk full"):
            train(spec, device="cpu")
    assert len(store.all()) > 0
    train(spec, device="cpu")
    assert_same_end(job.parent / "run", whole)
