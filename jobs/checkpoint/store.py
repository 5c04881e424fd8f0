"""The directory of a run's checkpoints.

    checkpoints/
      step-00000500-000001/       step, then the number of the save: the highest is the newest
        unit-00000.safetensors    one file for each unit, written while only that unit is looked at
        trainer.json
        manifest.json             names, sizes and hashes of the files; its own digest; written last
      .saving-...                 a save that was cut off; the next one removes it
      .lock                       held by the process that is saving

Order: files, each synced; manifest, synced; the directory synced; renamed; its parent synced; only then are older
checkpoints renamed away and deleted. So at any moment the newest complete one can be loaded. All paths are relative:
the directory can be moved. Nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ..errors import CheckpointError
from ..frozen import digest
from . import files

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})-(\d{6,})")
_LEFT_OVER = (".saving-", ".removing-")
_PLAIN_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FINITE_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. Its files are checked against their hashes when they are read."""

    path: Path
    step: int
    trainer: dict[str, Any]
    _units: dict[str, files.Written]
    score: float | None = None
    """What was measured of this state; lower is better."""

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read manifest and trainer state; CheckpointError, naming the file, when they are damaged."""
        manifest = _read_manifest(path / "manifest.json")
        trainer = _verified(path, files.Written(**manifest["trainer"]))
        units = {name: files.Written(**written) for name, written in manifest["units"].items()}
        return cls(path, manifest["step"], json.loads(trainer.read_bytes()), units, manifest.get("score"))

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, in the order in which they were saved."""
        return tuple(self._units)

    @property
    def bytes(self) -> int:
        """Size of the units' files."""
        return sum(written.bytes for written in self._units.values())

    def unit(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of one unit, with the dtypes and bits that were saved."""
        if name not in self._units:
            raise CheckpointError(
                f"checkpoint {self.path} has no unit {name!r}", hint=f"it has {', '.join(self.units) or 'none'}"
            )
        return dict(safetensors.torch.load_file(_verified(self.path, self._units[name])))

    def verify(self) -> None:
        """Read and check every file."""
        for written in self._units.values():
            _verified(self.path, written)


class CheckpointStore:
    """Saves and finds the checkpoints of one run.

    The ``keep`` newest are kept, and the one with the lowest score beside them. ``on_point`` is called with a name at
    every stage of a save: ``start``, ``unit NAME``, ``trainer``, ``manifest``, ``synced``, ``renamed``, ``published``,
    ``removing NAME``, ``removed NAME``, ``done``.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int = 3, *, on_point: Callable[[str], object] = lambda _: None
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory = Path(directory)
        self.keep = keep
        self._on_point = on_point

    def save(
        self,
        step: int,
        units: Iterable[tuple[str, Mapping[str, torch.Tensor]]],
        trainer: Mapping[str, Any],
        *,
        score: float | None = None,
    ) -> Path:
        """Write a checkpoint and return its directory; ``units`` may be a generator that makes one unit at a time.

        ``trainer`` holds JSON values; ``score``, where there is one, says how good the state is, lower being better.
        Raises CheckpointError when a tensor is not finite, a value not JSON, the disk
        is full or another process is saving here; earlier checkpoints are then as they were.
        """
        with self._locked() as mine:
            if not mine:
                raise self._taken()
            self._clean()
            saving = self.directory / f".saving-{self._next_name(step)}"
            try:
                self._write(saving, step, units, trainer, score)
                published = self._publish(saving)
                self._remove_old()
            except OSError as error:
                raise self._translated(error, _size(saving)) from error
            finally:
                shutil.rmtree(saving, ignore_errors=True)
            self._on_point("done")
            return published

    def rehearse(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a first file as a save does, read it back, and remove it: what a save would meet is met now.

        Raises CheckpointError when the file cannot be written, or comes back otherwise.
        """
        with self._locked() as mine:
            if not mine:
                raise self._taken()
            self._clean()
            saving = self.directory / ".saving-rehearsal"
            try:
                saving.mkdir()
                written = files.write_tensors(saving / "unit-00000.safetensors", tensors)
                files.sync_directory(saving)
                safetensors.torch.load_file(_verified(saving, written))
                saving.rename(self.directory / ".removing-rehearsal")
            except OSError as error:
                raise self._translated(error, _size(saving)) from error
            finally:
                self._clean()

    @property
    def bytes(self) -> int:
        """Size of the complete checkpoints."""
        return sum(_size(path) for path in self._complete())

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, or None. What a cut-off save left is removed, unless a save is running."""
        if self.directory.is_dir() and os.access(self.directory, os.W_OK):
            with self._locked() as mine:
                if mine:
                    self._clean()
        complete = self._complete()
        return Checkpoint.open(complete[-1]) if complete else None

    def best(self) -> Checkpoint | None:
        """The complete checkpoint with the lowest score, the older of two equal ones; None when none has a score."""
        path = self._best()
        return None if path is None else Checkpoint.open(path)

    def all(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first."""
        return [Checkpoint.open(path) for path in self._complete()]

    def _write(
        self,
        saving: Path,
        step: int,
        units: Iterable[tuple[str, Mapping[str, torch.Tensor]]],
        trainer: Mapping[str, Any],
        score: float | None,
    ) -> None:
        content = _json(trainer)
        saving.mkdir()
        self._on_point("start")
        written: dict[str, files.Written] = {}
        for name, tensors in units:
            if name in written:
                raise CheckpointError(f"two units are called {name!r}")
            _refuse_non_finite(name, tensors)
            written[name] = files.write_tensors(saving / f"unit-{len(written):05d}.safetensors", tensors)
            self._on_point(f"unit {name}")
        trainer_file = files.write_bytes(saving / "trainer.json", content)
        self._on_point("trainer")
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "score": score,
            "trainer": asdict(trainer_file),
            "units": {name: asdict(file) for name, file in written.items()},
        }
        files.write_bytes(saving / "manifest.json", _json({**manifest, "digest": digest(manifest)}))
        self._on_point("manifest")

    def _publish(self, saving: Path) -> Path:
        files.sync_directory(saving)
        self._on_point("synced")
        published = saving.with_name(saving.name.removeprefix(".saving-"))
        saving.rename(published)
        self._on_point("renamed")
        files.sync_directory(self.directory)
        self._on_point("published")
        return published

    def _remove_old(self) -> None:
        best = self._best()
        for path in self._complete()[: -self.keep]:
            if path == best:
                continue
            self._on_point(f"removing {path.name}")
            leaving = path.with_name(f".removing-{path.name}")
            path.rename(leaving)
            shutil.rmtree(leaving, ignore_errors=True)
            self._on_point(f"removed {path.name}")

    def _best(self) -> Path | None:
        scores = [(score, path) for path in self._complete() if (score := _score(path)) is not None]
        return min(scores, key=lambda scored: scored[0])[1] if scores else None

    def _complete(self) -> list[Path]:
        """Directories of complete checkpoints, oldest save first."""
        found = []
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match and (path / "manifest.json").is_file():
                found.append((int(match[2]), path))
        return [path for _, path in sorted(found)]

    def _next_name(self, step: int) -> str:
        numbers = [int(match[2]) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        return f"step-{step:08d}-{max(numbers, default=0) + 1:06d}"

    def _clean(self) -> None:
        """Remove what a killed process left: unfinished saves and removals, checkpoints without a manifest."""
        for path in list(self.directory.iterdir()):
            incomplete = _NAME.fullmatch(path.name) and not (path / "manifest.json").is_file()
            if incomplete or path.name.startswith(_LEFT_OVER):
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Whether this process alone writes here until the end of the block; a killed process holds nothing."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = (self.directory / ".lock").open("a")
        except OSError as error:
            raise self._translated(error, 0) from error
        with lock as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _taken(self) -> CheckpointError:
        return CheckpointError(
            f"another process is saving in {self.directory}", hint="give every run its own output directory"
        )

    def _translated(self, error: OSError, written: int) -> CheckpointError:
        if error.errno not in _FULL:
            return CheckpointError(
                f"cannot save a checkpoint in {self.directory}: {error}", hint="put that right, or set output.dir"
            )
        existing = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        available = shutil.disk_usage(existing).free
        needed = max(written + 1, *(_size(path) for path in self._complete()[-1:]), 0)
        return CheckpointError(
            f"disk full: a checkpoint in {self.directory} needs at least {needed:,} bytes, "
            f"{available + written:,} are available; the earlier checkpoints are intact",
            hint="free some space, keep fewer checkpoints (output.keep) or choose another output.dir",
        )


def _size(directory: Path) -> int:
    """Bytes of the files in a directory."""
    return sum(path.stat().st_size for path in directory.glob("*"))


def _json(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(dict(value), indent=1, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"trainer state is not JSON: {error}") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
        claimed = manifest.pop("digest")
        actual = digest(manifest)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise _damaged(path, "cannot be read") from error
    if claimed != actual:
        raise _damaged(path, "was altered")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}, this version reads {FORMAT}",
            hint="use the version of lazytrain that wrote it",
        )
    return dict(manifest)


def _score(directory: Path) -> float | None:
    """Score of a checkpoint; none of a damaged one, which only its own reading need complain of."""
    try:
        score = _read_manifest(directory / "manifest.json").get("score")
    except CheckpointError:
        return None
    return None if score is None else float(score)


def _verified(directory: Path, written: files.Written) -> Path:
    """The file's path, once its size and hash are what the manifest says."""
    path = directory / written.file
    if not _PLAIN_FILE.fullmatch(written.file):
        raise _damaged(path, "lies outside its checkpoint")
    if not path.is_file():
        raise _damaged(path, "is missing")
    size = path.stat().st_size
    if size != written.bytes:
        raise _damaged(path, f"has {size:,} bytes instead of {written.bytes:,}")
    if files.sha256(path) != written.sha256:
        raise _damaged(path, "was altered")
    return path


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint file {path} {what}", hint=f"remove {path.parent} to resume from the checkpoint before it"
    )


def _refuse_non_finite(unit: str, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        flat = tensor.detach().reshape(-1)
        for start in range(0, flat.numel(), _FINITE_CHUNK):
            largest = flat[start : start + _FINITE_CHUNK].abs().amax()  # propagates NaN; 20 times as fast as isfinite()
            if not largest.isfinite():
                raise CheckpointError(
                    f"tensor {name!r} of unit {unit!r} is not finite: not saved",
                    hint="training diverged; resume from the last checkpoint with a lower learning rate",
                )
