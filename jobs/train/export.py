"""The model of a run's checkpoint as a plain Hugging Face folder; no original file is needed."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint import Checkpoint, CheckpointStore, export_weights, saved_weights
from ..errors import InputError
from ..frozen import Frozen
from ..model import describe_model, empty_model
from ..run_directory import RunDirectory
from ..spec import load_spec


class Exported(Frozen):
    """What was written."""

    out: str
    step: int
    """Step after which the weights were as they are."""
    eval_loss: float | None
    """Evaluation loss at that step, where it was taken."""


def export_run(run_dir: str | Path, out: str | Path, which: str = "latest") -> Exported:
    """Write the model of checkpoint ``which`` (``latest``, ``best`` or a step) to ``out``, unit by unit.

    Raises InputError when ``run_dir`` is no run, has no such checkpoint, or ``out`` holds something already.
    """
    directory, folder = RunDirectory(Path(run_dir)), Path(out)
    if not directory.spec.exists():
        raise InputError(f"{run_dir} is not the directory of a run: it has no job.yaml", hint="name its output.dir")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already", hint="name a folder that is new or empty")
    checkpoint = _find(CheckpointStore(directory.checkpoints), which)
    model, tokenizer = empty_model(load_spec(directory.spec).model, directory.start, device="meta")
    with export_weights(folder) as writer:
        describe_model(model, tokenizer, writer.folder)
        for weights in saved_weights(checkpoint):
            writer.add(model, weights)
    return Exported(out=str(folder), step=checkpoint.step, eval_loss=checkpoint.score)


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
