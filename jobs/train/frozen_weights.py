"""Frozen weights of a run, kept once beside its checkpoints, which hold only what learns.

So a run with ``train.freeze`` goes on, and is exported, without the model that it began with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
from transformers import PreTrainedModel

from ..checkpoint.files import sha256, sync_directory, write_tensors
from ..errors import CheckpointError

Weights = Mapping[str, torch.Tensor]


def keep_frozen(model: PreTrainedModel, path: Path) -> str:
    """Write the frozen parameters by name, durably and at once, and return the file's SHA-256.

    Raises CheckpointError when the file cannot be written.
    """
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.unlink(missing_ok=True)
        written = write_tensors(temporary, frozen)
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        needed = sum(tensor.nbytes for tensor in frozen.values())
        raise CheckpointError(
            f"cannot keep the frozen weights, {needed:,} bytes, in {path}: {error.strerror}",
            hint="free some space or choose another output.dir",
        ) from error
    return written.sha256


def frozen_weights(path: Path, digest: str) -> dict[str, torch.Tensor]:
    """The tensors that `keep_frozen` wrote, mapped. Raises CheckpointError when they are gone or other ones."""
    if not path.is_file() or sha256(path) != digest:
        raise CheckpointError(
            f"{path}, which holds the frozen weights of the run, {'was altered' if path.is_file() else 'is missing'}",
            hint=f"put it back, or delete {path.parent} to start again",
        )
    return dict(safetensors.torch.load_file(path))


def take_frozen(model: PreTrainedModel, weights: Weights) -> None:
    """Give the model's frozen parameters these values."""
    for name, tensor in weights.items():
        model.get_parameter(name).data = tensor


def with_frozen(parts: Iterable[Weights], frozen: Weights) -> Iterator[dict[str, torch.Tensor]]:
    """Parts of a model's weights, each with the frozen ones of the same layer; what belongs to none comes last.

    The names under which a layer is published may need all of its tensors at once.
    """
    left = dict(frozen)
    for part in parts:
        layers = {_layer(name) for name in part}
        together = [name for name in left if _layer(name) in layers]
        yield {**part, **{name: left.pop(name) for name in together}}
    for layer in dict.fromkeys(_layer(name) for name in left):
        yield {name: tensor for name, tensor in left.items() if _layer(name) == layer}


def _layer(name: str) -> tuple[str, ...]:
    """The name as far as its first number, which counts the layers; all but the last part where there is none."""
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdecimal()]
    return tuple(parts[: numbers[0] + 1] if numbers else parts[:-1])
