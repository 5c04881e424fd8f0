"""A model as a plain Hugging Face folder, written unit by unit: no second copy of its weights is ever made."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from ..errors import CheckpointError
from . import files
from .store import Checkpoint

SHARD_BYTES = 1 << 30
"""Weights of one file, unless a single unit has more."""
_OLD = ".old"
_STREAMED = ("master.high", "master", "weights", "streamed")
"""Names, in a unit's saved state, of its weights in the dtype in which they stream."""


class WeightWriter:
    """Collects weights and writes a file whenever enough have come together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = self._parameters = 0

    def add(self, model: Any, weights: Mapping[str, torch.Tensor]) -> None:
        """Take weights by parameter name; under the names and in the shapes of the checkpoint that ``model`` is from.

        They may be views of memory that lives on; they are only read before the next call has returned or `finish`.
        """
        ignored = set(model._keys_to_ignore_on_save or ())
        kept = {name: tensor for name, tensor in weights.items() if name not in ignored}
        self._waiting |= revert_weight_conversion(model, kept)
        if sum(tensor.nbytes for tensor in self._waiting.values()) >= SHARD_BYTES:
            self._write()

    def finish(self) -> None:
        """Write the rest, give the files their final names, and the index that says what is where."""
        if self._waiting or not self._files:
            self._write()
        count = len(self._files)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
                 for i in range(count)]  # fmt: skip
        for number, name in enumerate(names):
            self._path(number).rename(self.folder / name)
        if count > 1:
            where = {weight: name for weights, name in zip(self._files, names, strict=True) for weight in weights}
            sizes = {"total_size": self._bytes, "total_parameters": self._parameters}
            index = json.dumps({"metadata": sizes, "weight_map": dict(sorted(where.items()))}, indent=2)
            files.write_bytes(self.folder / "model.safetensors.index.json", index.encode())

    def _write(self) -> None:
        files.write_tensors(self._path(len(self._files)), self._waiting)
        self._files.append(list(self._waiting))
        self._bytes += sum(tensor.nbytes for tensor in self._waiting.values())
        self._parameters += sum(tensor.numel() for tensor in self._waiting.values())
        self._waiting = {}

    def _path(self, number: int) -> Path:
        return self.folder / f".part-{number:05d}"


@contextmanager
def export_weights(folder: Path) -> Iterator[WeightWriter]:
    """A writer for ``folder``, which is there whole when the block has ended, or is what it was before.

    Raises CheckpointError when it cannot be written.
    """
    with export_folder(folder) as temporary:
        writer = WeightWriter(temporary)
        yield writer
        writer.finish()


@contextmanager
def export_folder(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes ``folder`` when the block has ended; after an error, ``folder`` is what it was.

    What a process that was killed here has left is removed first. Raises CheckpointError when it cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        temporary.mkdir()
        yield temporary
        files.sync_directory(temporary)
        _replace(temporary, folder)
    except OSError as error:
        raise CheckpointError(f"cannot write the model to {folder}: {error}", hint="free some space") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Remove what killed processes left beside ``folder``, which comes back where one had only just moved it away.

    A process number may be this one's own: in a container it is the same every time.
    """
    left = re.compile(rf"\.{re.escape(folder.name)}\.(\d+)({re.escape(_OLD)})?")
    for path in list(folder.parent.iterdir()):
        match = left.fullmatch(path.name)
        if match is None or (int(match[1]) != os.getpid() and _lives(int(match[1]))):
            continue
        if match[2] and not folder.exists():
            path.rename(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _replace(temporary: Path, folder: Path) -> None:
    old = temporary.with_name(temporary.name + _OLD)
    if folder.exists():
        folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    files.sync_directory(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def saved_weights(checkpoint: Checkpoint) -> Iterator[dict[str, torch.Tensor]]:
    """Weights of a checkpoint by parameter name, in the dtype in which they stream, one unit in memory at a time."""
    layouts = checkpoint.trainer["layouts"]
    for unit in checkpoint.units:
        state = checkpoint.unit(unit)
        if unit not in layouts:
            yield state
            continue
        flat = next(state[name] for name in _STREAMED if name in state)
        yield {
            name: flat[offset : offset + torch.Size(shape).numel()].view(shape) for name, shape, offset in layouts[unit]
        }
