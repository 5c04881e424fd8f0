"""From what somebody sends to a job: checked, with absolute paths below the allowed folders, in a folder of its own."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...jobs.errors import Forbidden, SpecError
from ...jobs.frozen import digest
from ...jobs.spec import JobSpec
from ...schedulers.hardware import known_models
from ..artifacts import inside
from ..settings import Settings
from ..store import NewJob

_LONGEST_PATH = 4096
_MOST_FILES = 10_000
_READ_WHOLE = ("model.", "data.train.", "data.eval.")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def new_job(
    spec: Mapping[str, Any],
    after: tuple[str, ...],
    user: str,
    key: str | None,
    settings: Settings,
    *,
    continues: str | None = None,
) -> NewJob:
    """The job that ``spec`` asks for. Raises SpecError or Forbidden, with the field."""
    resolved = resolve(spec, settings)
    job_id = f"j-{secrets.token_hex(5)}"
    values = resolved.model_dump(mode="json")
    return NewJob(
        id=job_id,
        user=user,
        name=resolved.name,
        spec=values,
        run_dir=str(Path(resolved.output.dir) / job_id),
        priority=resolved.queue.priority,
        after=after,
        continues=continues,
        idempotency_key=key,
        body_digest=digest(values, list(after), *([continues] if continues else [])),
        sentence="waits to be looked at",
    )


def resolve(spec: Mapping[str, Any], settings: Settings) -> JobSpec:
    """The checked job file; without a folder for its output it gets one of the service's."""
    output = spec.get("output") or {}
    if isinstance(output, dict) and not output.get("dir"):
        spec = {**spec, "output": {**output, "dir": str(settings.runs_dir)}}
    try:
        checked = JobSpec.model_validate({"name": "job", **spec})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"{field}: {first['msg']}", field=field) from None
    for field, text in _paths(checked):
        _check(field, text, settings)
    _check_code(checked, settings)
    return checked


def check_model(name: str, settings: Settings) -> None:
    """Raise SpecError for a model that is neither a name nor a path below the allowed folders."""
    if name.lower() not in known_models() and not _HUB_ID.fullmatch(name):
        _check("model", name, settings)


def _paths(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Every text of the job file that names something on disk."""
    if not _HUB_ID.fullmatch(spec.model.path):
        yield "model.path", spec.model.path
    for part in ("train", "eval"):
        for index, source in enumerate(getattr(spec.data, part)):
            if not source.path.startswith("hf://"):
                yield f"data.{part}.{index}.path", source.path
    template = spec.data.chat_template
    if template is not None and not re.fullmatch(r"[\w-]+", template):
        yield "data.chat_template", template
    if spec.data.cache is not None:
        yield "data.cache", spec.data.cache
    if spec.plan.nvme is not None:
        yield "plan.nvme", spec.plan.nvme
    yield "output.dir", spec.output.dir


def _check(field: str, text: str, settings: Settings) -> None:
    path = Path(text)
    if len(text) > _LONGEST_PATH:
        raise SpecError(f"{field}: the path has more than {_LONGEST_PATH} characters", field=field)
    if not path.is_absolute():
        raise SpecError(
            f"{field}: {text} is a relative path, and the service has another current folder",
            field=field,
            hint="write it from / on; lazytrain submit does so by itself",
        )
    roots = list(settings.allowed_roots)
    if field == "plan.nvme" and settings.nvme_dir is not None:
        roots.append(settings.nvme_dir)
    outside = [found for found in (path, *_links_in(path, field)) if not any(inside(found, root) for root in roots)]
    if outside:
        raise SpecError(
            f"{field}: {outside[0]} is outside of the folders that jobs may use",
            field=field,
            hint=f"they are {', '.join(map(str, roots))}; whoever runs the service can name others (LAZYTRAIN_ROOTS)",
        )


def _links_in(folder: Path, field: str) -> Iterator[Path]:
    """Symbolic links that reading the folder would follow: rows and models are read with all that is below.

    Raises SpecError for a folder of rows or a model with more files than anybody can look at.
    """
    seen, deep = 0, field.startswith(_READ_WHOLE)
    for where, folders, files in os.walk(folder):  # what cannot be read is passed over: the job will say so
        seen += len(folders) + len(files)
        if deep and seen > _MOST_FILES:
            raise SpecError(f"{field}: {folder} holds more than {_MOST_FILES:,} files", field=field, hint="name files")
        yield from (path for name in (*folders, *files) if (path := Path(where, name)).is_symlink())
        if not deep:
            return


def _check_code(spec: JobSpec, settings: Settings) -> None:
    if spec.model.trust_remote_code and spec.model.path not in settings.trusted_models:
        raise Forbidden(
            f"the code of {spec.model.path} may not run here (model.trust_remote_code)",
            hint="whoever runs the service can allow it (LAZYTRAIN_TRUSTED_MODELS)",
        )
