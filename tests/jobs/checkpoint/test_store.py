"""Checkpoints: exact, atomic at every fault point, durable in the right order, honest about damage and full disks."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from lazytrain.jobs.checkpoint import CheckpointStore
from lazytrain.jobs.errors import CheckpointError

Units = list[tuple[str, dict[str, torch.Tensor]]]


def units(seed: int) -> Units:
    generator = torch.Generator().manual_seed(seed)

    def unit(rows: int) -> dict[str, torch.Tensor]:
        return {
            "master.high": torch.randn(rows, 7, generator=generator).to(torch.bfloat16),
            "master.low": torch.randint(-(2**15), 2**15, (rows * 7,), generator=generator, dtype=torch.int16),
            "m.codes": torch.randint(0, 256, (rows * 7,), generator=generator, dtype=torch.uint8),
            "m.scales": torch.rand(rows, generator=generator),
            "format": torch.tensor([1, 256, rows, seed]),
            "nothing": torch.zeros(0, 3),
        }

    return [("model.embed", unit(11)), ("model.layers.0", unit(3)), ("../../head", unit(5))]


TRAINER = {"epoch": 1, "position": 0.1 + 0.2, "rng": "a\u00e4", "schedule": {"warmup": [1, 2]}, "best": None}


def assert_holds(store: CheckpointStore, step: int, expected: Units) -> None:
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == step
    assert checkpoint.units == tuple(name for name, _ in expected)
    for name, tensors in expected:
        got = checkpoint.unit(name)
        assert got.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert got[key].dtype == tensor.dtype
            assert got[key].shape == tensor.shape
            assert torch.equal(got[key].view(torch.uint8), tensor.contiguous().view(torch.uint8))


def left_over(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if not re.fullmatch(r"step-\d+-\d+|\.lock", p.name))


def test_round_trip_is_exact(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "not" / "there" / "yet")
    assert store.latest() is None
    path = store.save(12, units(1), TRAINER)
    assert_holds(store, 12, units(1))
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.trainer == TRAINER
    assert checkpoint.path == path
    checkpoint.verify()


def test_files_are_safetensors_and_json_that_others_can_read(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(1, units(1), TRAINER)
    suffixes = {file.suffix for file in path.iterdir()}
    assert suffixes == {".safetensors", ".json"}
    with safetensors.safe_open(path / "unit-00001.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("m.codes"), units(1)[1][1]["m.codes"])


def test_strided_tensors_are_saved_by_value(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    tensor = torch.arange(12.0).reshape(3, 4).t()
    store.save(1, [("u", {"t": tensor, "part": tensor[1:3]})], {})
    assert_holds(store, 1, [("u", {"t": tensor, "part": tensor[1:3]})])


def test_only_one_unit_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def stream() -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        for index in range(6):
            assert sum(ref() is not None for ref in alive) <= 1
            tensor = torch.ones(1000)
            alive.append(weakref.ref(tensor))
            yield f"unit{index}", {"t": tensor}
            del tensor

    CheckpointStore(tmp_path).save(1, stream(), {})
    assert len(alive) == 6


def test_keeps_the_last_ones_and_always_the_new_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20, 30):
        store.save(step, units(step), {})
    assert [c.step for c in store.all()] == [20, 30]
    store.save(30, units(31), {})
    assert_holds(store, 30, units(31))
    store.save(5, units(5), {})  # resumed from an older one by hand: the newest save is what counts
    assert_holds(store, 5, units(5))
    assert [c.step for c in store.all()] == [30, 5]
    assert left_over(tmp_path) == []


def test_the_best_one_is_kept_until_there_is_a_better_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for step, score in ((1, 0.5), (2, 0.3), (3, None), (4, 0.3), (5, 0.7)):
        store.save(step, units(step), {}, score=score)
    assert [(c.step, c.score) for c in store.all()] == [(2, 0.3), (5, 0.7)]
    store.save(6, units(6), {}, score=0.2)
    store.save(7, units(7), {})
    assert [c.step for c in store.all()] == [6, 7]
    (store.all()[0].path / "manifest.json").write_text("{}")  # damaged: not the best of anything, no harm to a save
    store.save(8, units(8), {})
    assert [c.step for c in store.all()] == [8]
    assert store.best() is None


def test_old_ones_are_removed_only_after_the_new_one_is_complete(tmp_path: Path) -> None:
    seen: dict[str, list[int]] = {}
    store = CheckpointStore(tmp_path, keep=1, on_point=lambda name: seen.update({name: steps(tmp_path)}))
    store.save(1, units(1), {})
    store.save(2, units(2), {})
    assert seen["manifest"] == [1]
    assert seen["published"] == [1, 2]
    assert seen["done"] == [2]


def steps(directory: Path) -> list[int]:
    return [c.step for c in CheckpointStore(directory).all()]


POINTS = [
    "start",
    "unit model.embed",
    "unit model.layers.0",
    "unit ../../head",
    "trainer",
    "manifest",
    "synced",
    "renamed",
    "published",
    "removing step-00000001-000001",
    "removed step-00000001-000001",
    "done",
]

KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
torch.set_num_threads(1)
from lazytrain.jobs.checkpoint import CheckpointStore
from test_store import TRAINER, POINTS, units
for index, point in enumerate(POINTS):
    child = os.fork()
    if child == 0:
        directory = Path({root!r}) / str(index)
        CheckpointStore(directory, keep=1).save(1, units(1), TRAINER)
        die = lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == point else None
        CheckpointStore(directory, keep=1, on_point=die).save(2, units(2), TRAINER)
        os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), (point, status)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for each fault point, in which a process was killed there while saving step 2 after step 1."""
    root = tmp_path_factory.mktemp("killed")
    script = KILLED.format(tests=str(Path(__file__).parent), root=str(root))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    return root


@pytest.mark.parametrize("point", POINTS)
def test_kill_at_any_point_leaves_a_loadable_checkpoint(killed: Path, point: str) -> None:
    directory = killed / str(POINTS.index(point))
    store = CheckpointStore(directory, keep=1)
    step = 2 if POINTS.index(point) >= POINTS.index("renamed") else 1
    assert_holds(store, step, units(step))
    assert left_over(directory) == []
    store.save(3, units(3), TRAINER)
    assert_holds(store, 3, units(3))
    assert steps(directory) == [3]


def test_points_are_all_points(tmp_path: Path) -> None:
    seen: list[str] = []
    store = CheckpointStore(tmp_path, keep=1, on_point=seen.append)
    store.save(1, units(1), {})
    seen.clear()
    store.save(2, units(2), {})
    assert seen == POINTS


def test_everything_is_synced_before_what_refers_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str, int]] = []
    fsync, rename = os.fsync, Path.rename

    def traced_fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        events.append(("fsync", name, os.fstat(descriptor).st_size))
        fsync(descriptor)

    def traced_rename(self: Path, target: Path) -> Path:
        events.append(("rename", self.name, 0))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "rename", traced_rename)
    path = CheckpointStore(tmp_path).save(7, units(1), TRAINER)
    saving = f".saving-{path.name}"
    order = [(what, name) for what, name, _ in events]
    files = [f"unit-{i:05d}.safetensors" for i in range(3)] + ["trainer.json", "manifest.json"]
    assert order == [
        *(("fsync", name) for name in files),
        ("fsync", saving),
        ("rename", saving),
        ("fsync", tmp_path.name),
    ]
    sizes = {name: size for _, name, size in events}
    assert all(sizes[name] == (path / name).stat().st_size for name in files)


DAMAGE = [
    (file, damage)
    for file in ("unit-00001.safetensors", "trainer.json", "manifest.json")
    for damage in ("truncate", "flip", "zeros", "remove")
    if (file, damage) != ("manifest.json", "remove")  # then it is incomplete, not damaged
]


@pytest.mark.parametrize(("file", "damage"), DAMAGE)
def test_damage_is_found_and_the_file_named(tmp_path: Path, file: str, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(1, units(1), TRAINER) / file
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "zeros":
        path.write_bytes(bytes(len(content)))
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=re.escape(file)):
        checkpoint = store.latest()
        assert checkpoint is not None
        checkpoint.unit("model.embed")  # an undamaged unit loads
        checkpoint.unit("model.layers.0")


def test_without_a_manifest_it_is_incomplete(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, units(1), {})
    (store.save(2, units(2), {}) / "manifest.json").unlink()
    assert_holds(store, 1, units(1))
    assert steps(tmp_path) == [1]
    assert len(list(tmp_path.glob("step-*"))) == 1


@pytest.mark.parametrize("content", ["", "[]", "null", '"text"', "3", '{"digest": []}', "\x00"])
def test_what_is_no_manifest_is_named(tmp_path: Path, content: str) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(1, units(1), {}) / "manifest.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        store.latest()


def test_manifest_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    from lazytrain.jobs.frozen import digest

    store = CheckpointStore(tmp_path / "run")
    path = store.save(1, units(1), {}) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    manifest["units"]["model.embed"]["file"] = "../../secret"
    path.write_text(json.dumps({**manifest, "digest": digest(manifest)}))
    checkpoint = store.latest()
    assert checkpoint is not None
    with pytest.raises(CheckpointError, match="outside"):
        checkpoint.unit("model.embed")


def test_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    from lazytrain.jobs.frozen import digest

    store = CheckpointStore(tmp_path)
    path = store.save(1, units(1), {}) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    manifest["format"] = 99
    path.write_text(json.dumps({**manifest, "digest": digest(manifest)}))
    with pytest.raises(CheckpointError, match="format 99"):
        store.latest()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_weights_are_never_written(tmp_path: Path, bad: float, dtype: torch.dtype) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, units(1), TRAINER)
    broken = units(2)
    broken[1][1]["master"] = torch.zeros(100, dtype=dtype)
    broken[1][1]["master"][57] = bad
    with pytest.raises(CheckpointError, match=r"'master' of unit 'model\.layers\.0' is not finite"):
        store.save(2, broken, TRAINER)
    assert_holds(store, 1, units(1))
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("point", POINTS[:7])
def test_full_disk_leaves_the_previous_one_intact(tmp_path: Path, point: str) -> None:
    CheckpointStore(tmp_path, keep=1).save(1, units(1), TRAINER)

    def full(name: str) -> None:
        if name == point:
            raise OSError(errno.ENOSPC, "No space left on device")

    store = CheckpointStore(tmp_path, keep=1, on_point=full)
    with pytest.raises(CheckpointError, match=r"needs at least [\d,]+ bytes, [\d,]+ are available") as caught:
        store.save(2, units(2), TRAINER)
    assert "output.keep" in caught.value.hint
    assert_holds(CheckpointStore(tmp_path), 1, units(1))
    assert left_over(tmp_path) == []


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data[:13])))
    store = CheckpointStore(tmp_path)
    store.save(1, units(1), TRAINER)
    monkeypatch.undo()
    assert_holds(store, 1, units(1))


def test_a_real_write_error_is_translated(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot save"):
        CheckpointStore(tmp_path / "file").save(1, units(1), {})

    def broken(_: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(CheckpointError, match="Input/output error"):
        CheckpointStore(tmp_path, on_point=broken).save(1, units(1), {})


def test_directory_can_be_moved(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "old").save(1, units(1), TRAINER)
    shutil.move(tmp_path / "old", tmp_path / "new")
    assert_holds(CheckpointStore(tmp_path / "new"), 1, units(1))
    for file in (tmp_path / "new").rglob("*.json"):
        assert str(tmp_path) not in file.read_text()


def test_reading_during_a_save_leaves_it_alone_and_a_second_writer_is_refused(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(1, units(1), {})
    seen: list[Any] = []

    def look(name: str) -> None:
        if name == "manifest":
            seen.append(steps(tmp_path))
            with pytest.raises(CheckpointError, match="another process is saving"):
                CheckpointStore(tmp_path).save(3, units(3), {})

    store = CheckpointStore(tmp_path, on_point=look)
    store.save(2, units(2), {})
    assert seen == [[1]]
    assert_holds(store, 2, units(2))


@pytest.mark.parametrize("value", [torch.ones(1), float("nan"), {1, 2}, b"x"])
def test_trainer_state_must_be_json(tmp_path: Path, value: object) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="not JSON"):
        store.save(1, units(1), {"rng": value})
    assert store.latest() is None


def test_two_units_of_one_name_unknown_units_and_dtypes_are_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="two units"):
        store.save(1, [("a", {}), ("a", {})], {})
    with pytest.raises(CheckpointError, match="complex64"):
        store.save(1, [("a", {"t": torch.zeros(2, dtype=torch.complex64)})], {})
    store.save(1, [("a", {"t": torch.zeros(2)})], {})
    checkpoint = store.latest()
    assert checkpoint is not None
    with pytest.raises(CheckpointError, match="no unit 'b'"):
        checkpoint.unit("b")
    with pytest.raises(ValueError, match="keep"):
        CheckpointStore(tmp_path, keep=0)


def test_foreign_pickles_in_the_directory_are_never_opened(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    path = store.save(1, units(1), TRAINER)
    marker = tmp_path / "ran"
    evil = f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode()
    for name in ("rng_state.pth", "optimizer.pt", "trainer.pkl"):
        (path / name).write_bytes(evil)
    assert_holds(store, 1, units(1))
    assert not marker.exists()


def test_scalars_are_saved(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(1, [("u", {"s": torch.tensor(3.0)})], {})
    with safetensors.safe_open(path / "unit-00000.safetensors", framework="pt") as file:
        assert file.get_tensor("s").item() == 3.0
        assert file.get_tensor("s").shape == ()
