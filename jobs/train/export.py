"""The model of a run's checkpoint as a plain Hugging Face folder, or its adapters as one of peft.

No original file is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..adapters import save_adapters
from ..checkpoint import Checkpoint, CheckpointStore, export_folder, export_weights, saved_weights
from ..errors import InputError
from ..frozen import Frozen
from ..learning import select_learning
from ..model import describe_model, empty_model
from ..run_directory import RunDirectory
from ..spec import JobSpec, load_spec
from .frozen_weights import frozen_weights, with_frozen


class Exported(Frozen):
    """What was written."""

    out: str
    step: int
    """Step after which the weights were as they are."""
    eval_loss: float | None
    """Evaluation loss at that step, where it was taken."""


def export_run(run_dir: str | Path, out: str | Path, which: str = "latest") -> Exported:
    """Write the model of checkpoint ``which`` (``latest``, ``best`` or a step) to ``out``, unit by unit.

    Of a run with ``lora`` it writes the adapters, which ``PeftModel.from_pretrained`` loads.

    Raises InputError when ``run_dir`` is no run, has no such checkpoint, or ``out`` holds something already.
    """
    directory, folder = RunDirectory(Path(run_dir)), Path(out)
    if not directory.spec.exists():
        raise InputError(f"{run_dir} is not the directory of a run: it has no job.yaml", hint="name its output.dir")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already", hint="name a folder that is new or empty")
    checkpoint = _find(CheckpointStore(directory.checkpoints), which)
    spec = load_spec(directory.spec)
    model, tokenizer = empty_model(spec.model, directory.start, device="meta")
    select_learning(model, spec)
    parts = saved_weights(checkpoint)
    if spec.train.freeze:
        parts = with_frozen(parts, frozen_weights(directory.frozen, checkpoint.trainer["base"]))
    write_model(folder, spec, model, tokenizer, parts)
    return Exported(out=str(folder), step=checkpoint.step, eval_loss=checkpoint.score)


def write_model(
    folder: Path, spec: JobSpec, model: Any, tokenizer: Any, parts: Iterable[Mapping[str, torch.Tensor]]
) -> None:
    """Write what a job has trained, given part by part by parameter name: a model, or adapters in peft's format.

    Raises CheckpointError when ``folder`` cannot be written; it is then what it was.
    """
    if spec.lora is not None:
        with export_folder(folder) as temporary:
            tokenizer.save_pretrained(temporary)
            save_adapters(model, parts, spec.model.path, temporary)
        return
    with export_weights(folder) as writer:
        describe_model(model, tokenizer, writer.folder)
        for weights in parts:
            writer.add(model, weights)


def _find(store: CheckpointStore, which: str) -> Checkpoint:
    there = store.all()
    named = {"latest": there[-1] if there else None, "best": store.best()}
    found = named.get(which) or next((one for one in reversed(there) if str(one.step) == which), None)
    if found is None:
        known = ", ".join(str(one.step) for one in there) or "none"
        raise InputError(
            f"{store.directory} has no checkpoint {which!r}", hint=f"there are latest, best and the steps {known}"
        )
    return found
