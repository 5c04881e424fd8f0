"""What is proved before a device is taken: checkpoints can be written and read back, and there is room for all of them.

A run that would fail at its first save, hours from now, fails here.
"""

from __future__ import annotations

import shutil

import torch
from torch import nn

from ..errors import DoesNotFit
from ..layout import Layout
from ..units import format_bytes
from .position import Position
from .setup import Setup

SHARD_BYTES = 1 << 26
"""Weights, at most, in the file that is written and read back."""


def rehearse(setup: Setup) -> None:
    """Write, read back and remove a first file of weights, and compare the room that there is with what will be needed.

    Raises CheckpointError when the folder cannot be written, DoesNotFit when the room is too small.
    """
    setup.store.rehearse(_first_shard(setup.model))
    needed, there = kept_bytes(setup), setup.store.bytes
    available = shutil.disk_usage(setup.store.directory).free + there
    if needed <= available:
        return
    each, hint = checkpoint_bytes(setup), _hint(setup)
    reason = {"resource": "disk", "needed_bytes": needed, "available_bytes": available}
    raise DoesNotFit(
        f"no room for this run's checkpoints in {setup.store.directory}: {format_bytes(needed)} are needed "
        f"({most_at_once(setup)} checkpoints of {format_bytes(each)} and the trained model), "
        f"{format_bytes(available)} are available",
        reasons=({**reason, "shortfall_bytes": needed - available, "hint": hint},),
        hint=hint,
    )


def checkpoint_bytes(setup: Setup) -> int:
    """Bytes of one checkpoint: weights that learn, their exact masters, and the optimizer's state."""
    optimizer, dtype = setup.optimizer(), getattr(torch, setup.facts.dtype)
    learning = {name: tuple(p.shape) for name, p in setup.model.named_parameters() if p.requires_grad}
    with torch.device("meta"):  # shapes only
        return sum(optimizer.unit(Layout.of({name: shape}), None, dtype).bytes for name, shape in learning.items())


def most_at_once(setup: Setup) -> int:
    """Checkpoints that will be there at the same time: those that are kept, the best, and the one being written."""
    steps = _steps_left(setup)
    evaluations = round(steps / max(1, setup.batches_between_evaluations)) if len(setup.data.eval) else 0
    saves = steps // setup.spec.output.save_every + evaluations + 1
    return min(saves, setup.spec.output.keep + bool(evaluations) + 1)


def kept_bytes(setup: Setup) -> int:
    """Most bytes that checkpoints and the trained model take at any time; the model comes after the last save."""
    each, facts = checkpoint_bytes(setup), setup.facts
    learned = facts.trainable_parameters if setup.spec.lora is not None else facts.parameters
    return (most_at_once(setup) - 1) * each + max(each, learned * facts.element_bytes)


def _steps_left(setup: Setup) -> int:
    position = Position() if setup.checkpoint is None else Position.from_dict(setup.checkpoint.trainer["position"])
    section = setup.spec.train
    steps = setup.order().steps(position, section.epochs)
    return max(0, min(steps, section.max_steps or steps) - position.steps)


def _hint(setup: Setup) -> str:
    changes = ["free some space", "choose an output.dir on a larger disk"]
    if setup.spec.output.keep > 1:
        changes.append(f"keep fewer checkpoints (output.keep is {setup.spec.output.keep})")
    return f"{', '.join(changes[:-1])} or {changes[-1]}"


def _first_shard(model: nn.Module) -> dict[str, torch.Tensor]:
    """The first weights of the model, as many as make a file worth writing."""
    shard: dict[str, torch.Tensor] = {}
    left = SHARD_BYTES
    for name, parameter in model.named_parameters():
        shard[name] = parameter.detach().reshape(-1)[: left // parameter.element_size()]
        left -= shard[name].nbytes
        if left <= 0:
            break
    return shard
