"""Which trainer a file is for, and a job file that validates."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import ValidationError

from ...jobs.errors import InputError
from ...jobs.spec import JobSpec
from ...jobs.spec.document import Document, dotted, parse_document, read_document
from . import axolotl, llamafactory, megatrain
from .draft import Conversion, Draft


def convert(path: str | Path) -> Conversion:
    """The job file that says the same as a LLaMA-Factory, Axolotl or MegaTrain file.

    Relative paths are taken over as they are: those trainers count them from the folder where they are started, a job
    file from its own. Raises SpecError for a file that is not YAML, InputError for one of none of these trainers, for
    one of another kind of training, and for one that says too little.
    """
    return _checked(read_document(path), _name(Path(path)))


def convert_text(text: str, name: str = "the text") -> Conversion | None:
    """The same for a text that was pasted; None for one of none of these trainers. Raises as `convert` does."""
    document = parse_document(text, name)
    known = (llamafactory.is_llamafactory, axolotl.is_axolotl, megatrain.is_megatrain)
    return _checked(document, "job") if any(fits(document.values) for fits in known) else None


def _checked(document: Document, name: str) -> Conversion:
    conversion = _convert(document)
    job = {"name": name, **conversion.job}
    _check(job, document, conversion.source)
    return Conversion(conversion.source, job, conversion.notes)


def _convert(document: Document) -> Conversion:
    draft = Draft(document)
    if llamafactory.is_llamafactory(document.values):
        return llamafactory.convert(draft)
    if axolotl.is_axolotl(document.values):
        return axolotl.convert(draft)
    if megatrain.is_megatrain(document.values):
        return megatrain.convert(draft)
    raise InputError(
        f"{document.file} is no file of LLaMA-Factory, Axolotl or MegaTrain",
        hint="they have model_name_or_path and dataset, base_model and datasets, or the sections model and training",
    )


def _name(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:100] or "job"


def _check(job: dict[str, object], document: Document, source: str) -> None:
    """Raise InputError unless the job validates (with the folder that an absent output.dir becomes)."""
    output = {"dir": f"runs/{job['name']}", **(job["output"] if isinstance(job.get("output"), dict) else {})}  # type: ignore[dict-item]
    try:
        JobSpec.model_validate({**job, "output": output})
    except ValidationError as error:
        problems = [f"{dotted(each['loc'])}: {each['msg']}" for each in error.errors(include_url=False)]
        raise InputError(
            f"{document.file}: what this {source} file says makes no job: {'; '.join(problems)}",
            hint="add what is missing, or correct the value there",
        ) from None
