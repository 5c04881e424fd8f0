"""A run that is paused: nothing of it is on the device, and what it learns is the same to the last bit."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import OutOfMemory
from lazytrain.jobs.executor import Emulated, Streamed
from lazytrain.jobs.executor.devices import EmulatedDevice
from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.tracking import read_metrics
from lazytrain.jobs.train import Pause, train
from lazytrain.jobs.train import run as run_module

GPU = Emulated(memory_bytes=1 << 26)


def losses(folder: Path) -> list[Any]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(m["step"], m.get("loss"), m.get("eval_loss"), m.get("grad_norm")) for m in rows]


class Asked:
    """Asks for a pause after each of ``steps``, for a few looks; notes what lives on the device meanwhile."""

    def __init__(self, steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps, self.step, self.looks = steps, 0, 0
        self.live: list[int] = []
        self.streamed: Streamed | None = None
        original = run_module.stream

        def stream(*args: Any, **options: Any) -> Streamed:
            self.streamed = original(*args, **options)
            return self.streamed

        monkeypatch.setattr(run_module, "stream", stream)

    def progress(self, record: Any) -> None:
        self.step = int(record["step"])

    def asked(self) -> bool:
        if self.step not in self.steps:
            return False
        self.looks += 1
        if self.looks == 4:
            self.steps.remove(self.step)
            self.looks = 0
            return False
        return True

    def told(self, paused: bool) -> None:
        if paused:
            gc.collect()
            assert self.streamed is not None
            assert isinstance(self.streamed.device, EmulatedDevice)
            self.live.append(self.streamed.device._tracker.live_bytes)

    @property
    def pause(self) -> Pause:
        return Pause(self.asked, self.told)


def test_the_device_is_empty_and_the_curve_is_the_same(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(load_spec(job, ["output.dir=a", "train.epochs=2"]), device=GPU)
    asks = Asked({2, 3, 11}, monkeypatch)
    paused = train(
        load_spec(job, ["output.dir=b", "train.epochs=2"]), device=GPU, pause=asks.pause, progress=asks.progress
    )
    assert paused.status == "done"
    assert losses(job.parent / "b") == losses(job.parent / "a")
    assert paused.loss == plain.loss
    assert len(asks.live) == 3
    assert max(asks.live) < 1024  # buffers of the model; slots and everything else are given back
    assert paused.peak_gpu_bytes <= plain.peak_gpu_bytes


def test_no_pause_after_the_last_step(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = Asked({3}, monkeypatch)
    spec = load_spec(job, ["train.max_steps=3"])
    assert train(spec, device=GPU, pause=asks.pause, progress=asks.progress).status == "done"
    assert asks.live == []


def test_stopped_while_it_is_paused_it_saves_without_the_device_and_goes_on_alike(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(load_spec(job, ["output.dir=a"]), device=GPU)
    asks = Asked({5}, monkeypatch)
    stop: list[bool] = []

    def told(paused: bool) -> None:
        stop.append(True)  # as soon as it is paused

    spec = load_spec(job, ["output.dir=b"])
    first = train(spec, device=GPU, pause=Pause(asks.asked, told), progress=asks.progress, stop=lambda: bool(stop))
    assert (first.status, first.steps) == ("stopped", 5)
    assert train(spec, device=GPU).status == "done"
    assert losses(job.parent / "b") == losses(job.parent / "a")


def test_a_device_without_room_after_the_pause_costs_no_step(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(load_spec(job, ["output.dir=a"]), device=GPU)
    asks = Asked({5}, monkeypatch)

    def full(streamed: Streamed) -> None:
        raise OutOfMemory(tier="gpu", requested_bytes=3, used_bytes=8, budget_bytes=10)

    with monkeypatch.context() as patched:
        patched.setattr(Streamed, "take_device", full)
        spec = load_spec(job, ["output.dir=b"])
        first = train(spec, device=GPU, pause=asks.pause, progress=asks.progress)
    assert (first.status, first.steps) == ("stopped", 5)
    assert train(spec, device=GPU).status == "done"
    assert losses(job.parent / "b") == losses(job.parent / "a")


def test_time_in_a_pause_is_not_spent(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a time limit is not ended by a pause that is longer."""
    asks = Asked({2}, monkeypatch)
    clock = time.monotonic
    jump = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + jump[0])

    def told(paused: bool) -> None:
        jump[0] += 10_000.0

    spec = load_spec(job, ["train.max_steps=4", "queue.max_duration=1h"])
    done = train(spec, device=GPU, pause=Pause(asks.asked, told), progress=asks.progress)
    assert (done.status, done.steps) == ("done", 4)
