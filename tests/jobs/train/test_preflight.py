"""What would end a run at its first save ends it before a device is taken, and says what to change."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from lazytrain.jobs.checkpoint import CheckpointStore
from lazytrain.jobs.errors import CheckpointError, DoesNotFit, InputError
from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.train import preflight, run, train
from lazytrain.jobs.train.setup import set_up

SHORT = ["data.split={train: 1.0}", "train.max_steps=4", "output.save_every=1", "output.keep=2"]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*given: object, **options: object) -> None:
        raise AssertionError("a device was taken")

    monkeypatch.setattr(run, "stream", opened)


def free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: Usage(1 << 40, 0, nbytes))


def needed_by(job: Path, *settings: str) -> int:
    spec = load_spec(job, [*SHORT, *settings, f"output.dir={job.parent / 'asked'}"])
    setup = set_up(spec, None, run.RunDirectory(Path(spec.output.dir)), lambda name: None)
    return preflight.kept_bytes(setup)


@pytest.mark.usefixtures("no_device")
def test_too_little_room_says_how_much_is_needed_and_what_to_change(job: Path, monkeypatch) -> None:
    needed = needed_by(job)
    free(monkeypatch, needed - 1)
    with pytest.raises(DoesNotFit, match="no room for this run's checkpoints") as raised:
        train(load_spec(job, SHORT), device="cpu")
    (reason,) = raised.value.reasons
    assert (reason["resource"], reason["needed_bytes"], reason["available_bytes"]) == ("disk", needed, needed - 1)
    assert reason["shortfall_bytes"] == 1
    assert "output.keep is 2" in raised.value.hint and "output.dir" in raised.value.hint
    free(monkeypatch, needed)
    with pytest.raises(AssertionError, match="a device was taken"):
        train(load_spec(job, SHORT), device="cpu")


def test_the_room_is_that_of_what_a_run_leaves(job: Path) -> None:
    """Four saves, two kept and one being written, and the model: never more on the disk than was reckoned."""
    most, whole = [0], needed_by(job)
    folders = [job.parent / "run" / name for name in ("checkpoints", "model", ".model")]

    def on_point(name: str) -> None:
        if name in ("manifest", "exported", "result"):
            found = [f for folder in folders for f in folder.rglob("*.safetensors")]
            most[0] = max(most[0], sum(file.stat().st_size for file in found))

    train(load_spec(job, SHORT), device="cpu", on_point=on_point)
    assert 0.95 * whole < most[0] < 1.05 * whole


def test_what_is_kept_already_needs_no_room_again(job: Path, monkeypatch) -> None:
    steps: list[object] = []
    spec = load_spec(job, SHORT)
    train(spec, device="cpu", progress=steps.append, stop=lambda: len(steps) > 2)
    there = CheckpointStore(job.parent / "run" / "checkpoints")
    assert there.bytes == sum(f.stat().st_size for f in there.directory.rglob("step-*/*"))
    setup = set_up(spec, None, run.RunDirectory(job.parent / "run"), lambda name: None)
    free(monkeypatch, preflight.kept_bytes(setup) - there.bytes)
    assert train(spec, device="cpu").status == "done"


def test_few_saves_need_little_room(job: Path) -> None:
    one = needed_by(job, "output.save_every=100", "output.keep=9")
    assert one < needed_by(job, "output.keep=9") / 3


@pytest.mark.usefixtures("no_device")
def test_a_first_file_is_written_and_read_back_and_nothing_of_it_stays(job: Path, monkeypatch) -> None:
    done, original = [], CheckpointStore.rehearse
    monkeypatch.setattr(CheckpointStore, "rehearse", lambda *given: done.append(given[1]) or original(*given))
    with pytest.raises(AssertionError, match="a device was taken"):
        train(load_spec(job, SHORT), device="cpu")
    assert sum(tensor.numel() for tensor in done[0].values()) > 1000
    assert [path.name for path in (job.parent / "run" / "checkpoints").iterdir()] == [".lock"]


@pytest.mark.usefixtures("no_device")
def test_a_disk_that_is_full_or_gives_back_other_bytes_is_found(job: Path, monkeypatch) -> None:
    write = os.write

    def full(descriptor: int, part: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk, pytest.raises(CheckpointError, match="disk full"):
        disk.setattr("lazytrain.jobs.checkpoint.files.os.write", full)
        train(load_spec(job, SHORT), device="cpu")
    with monkeypatch.context() as disk, pytest.raises(CheckpointError, match="was altered"):
        disk.setattr("lazytrain.jobs.checkpoint.files.os.write", lambda d, part: write(d, bytes(b ^ 1 for b in part)))
        train(load_spec(job, SHORT), device="cpu")
    assert [path.name for path in (job.parent / "run" / "checkpoints").iterdir()] == [".lock"]


@pytest.mark.usefixtures("no_device")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_found(job: Path) -> None:
    (job.parent / "run" / "checkpoints").mkdir(parents=True)
    (job.parent / "run" / "checkpoints").chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            train(load_spec(job, SHORT), device="cpu")
    finally:
        (job.parent / "run" / "checkpoints").chmod(0o700)
        shutil.rmtree(job.parent / "run")


@pytest.mark.usefixtures("no_device")
def test_a_file_where_the_folder_should_be_is_found(job: Path) -> None:
    (job.parent / "run").mkdir()
    (job.parent / "run" / "checkpoints").write_text("not a folder")
    with pytest.raises(CheckpointError, match="checkpoints"):
        train(load_spec(job, SHORT), device="cpu")
    (job.parent / "file").write_text("not a folder")
    with pytest.raises(InputError, match="cannot write to"):
        train(load_spec(job, [*SHORT, "output.dir=file"]), device="cpu")
