"""From a job file to a checked JobSpec, or to an error that says where and what to write instead."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..errors import SpecError
from .document import Document, Location, dotted, override, parse_document, read_document
from .sections import JobSpec

_MOST_PROBLEMS = 10


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read and check a job file.

    ``overrides`` are ``section.key=value`` texts that win over the file. Relative paths in the file start at the file's
    folder, those in overrides at the current one; ``model.path`` stays as it is when no such file exists and it reads
    like a hub id. Raises SpecError with file, line and field, listing all problems found.
    """
    document = read_document(path)
    for setting in overrides:
        override(document, setting)
    document.values.setdefault("name", _name_of(Path(path)))
    _add_output_dir(document)
    _resolve_paths(document, Path(path).absolute().parent)
    try:
        return JobSpec.model_validate(document.values)
    except ValidationError as error:
        raise _spec_error(document, error.errors(include_url=False)) from None


def check_text(text: str, name: str = "the text") -> dict[str, Any]:
    """The values of a job file that was typed or pasted, as far as they are said there; its paths are left as they are.

    Raises SpecError as `load_spec` does; without ``output.dir`` the service finds a folder.
    """
    document = parse_document(text, name)
    said = copy.deepcopy(document.values)
    document.values.setdefault("name", "job")
    _add_output_dir(document)
    try:
        JobSpec.model_validate(document.values)
    except ValidationError as error:
        raise _spec_error(document, error.errors(include_url=False)) from None
    return said


def _name_of(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:100] or "job"


def _add_output_dir(document: Document) -> None:
    output = document.values.setdefault("output", {})
    if isinstance(output, dict):
        output.setdefault("dir", f"runs/{document.values['name']}")


def _resolve_paths(document: Document, folder: Path) -> None:
    for location in _path_locations(document):
        value = document.get(location)
        if not isinstance(value, str) or not value:
            continue
        from_file = document.line(location) > 0 or location == ("output", "dir")
        resolved = (folder if from_file else Path.cwd()) / Path(value).expanduser()
        if not resolved.exists() and _stays(location, value, resolved):
            continue
        if "$" in value and not resolved.exists():
            raise document.error(location, f"{value!r}: variables are not filled in", hint="write the path itself")
        document.set(location, str(resolved))


def _path_locations(document: Document) -> Iterator[Location]:
    yield from (("model", "path"), ("plan", "nvme"), ("output", "dir"), ("data", "cache"), ("data", "chat_template"))
    for part in ("train", "eval"):
        sources = document.get(("data", part))
        for index in range(len(sources) if isinstance(sources, list) else 0):
            yield ("data", part, index, "path")


def _stays(location: Location, value: str, resolved: Path) -> bool:
    """Whether a text that names no file means something else."""
    if location == ("data", "chat_template"):
        return "/" not in value and "." not in value
    if location[0] == "data" and location[-1] == "path":
        return value.startswith("hf://")
    return location == ("model", "path") and _reads_like_a_hub_id(value)


def _reads_like_a_hub_id(value: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", value) is not None


def _spec_error(document: Document, problems: list[ErrorDetails]) -> SpecError:
    errors = [
        document.error(problem["loc"], _explain(problem)) for problem in problems if not _follows(problem, problems)
    ]
    errors.sort(key=lambda error: error.line)
    first, rest = errors[0], errors[1:_MOST_PROBLEMS]
    message = "\n".join([first.message, *(error.message for error in rest)])
    if len(errors) > _MOST_PROBLEMS:
        message += f"\n... and {len(errors) - _MOST_PROBLEMS} more problems"
    return SpecError(message, field=first.field, line=first.line, hint=_hint(problems))


def _follows(problem: ErrorDetails, problems: list[ErrorDetails]) -> bool:
    """A list counts as too short once one of its items is wrong; the item is the problem."""
    location = problem["loc"]
    return problem["type"] == "too_short" and any(
        other["loc"][: len(location)] == location and other is not problem for other in problems
    )


def _explain(problem: ErrorDetails) -> str:
    kind, value = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return f"unknown key{_suggest(problem['loc'])}"
    if kind == "missing":
        return "is missing"
    if kind in ("model_type", "model_attributes_type"):
        return f"must be a mapping of keys, not {value!r}"
    if kind == "too_short":
        return "must not be empty"
    if kind == "string_pattern_mismatch":
        return f"{value!r} may hold only letters, digits, dots, dashes and underscores"
    if kind == "value_error":
        reason = str(problem["ctx"]["error"])
        return f"{reason}, not {value!r}" if reason.startswith("must be") else reason
    text = problem["msg"].replace("Input should be", "must be").replace("Input should have", "must have")
    return f"{text}, not {_short(value)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _suggest(location: Location) -> str:
    """Nearest key of the same section; else the same key where it does exist."""
    key, siblings = str(location[-1]), _keys_at(location[:-1])
    near = difflib.get_close_matches(key, siblings, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    elsewhere = [dotted(found) for found in _all_keys(JobSpec, ()) if found[-1] == key]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; known here: {', '.join(siblings)}"


def _keys_at(location: Location) -> list[str]:
    section: type[BaseModel] = JobSpec
    for part in location:
        if isinstance(part, str) and part in section.model_fields:
            section = _section_in(section.model_fields[part].annotation) or section
    return list(section.model_fields)


def _all_keys(section: type[BaseModel], location: Location) -> Iterator[Location]:
    for name, info in section.model_fields.items():
        yield (*location, name)
        inner = _section_in(info.annotation)
        if inner is not None:
            yield from _all_keys(inner, (*location, name))


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _section_in(argument)
        if found is not None:
            return found
    return None


def _hint(problems: list[ErrorDetails]) -> str:
    missing = [dotted(problem["loc"]) for problem in problems if problem["type"] == "missing"]
    return f"add {', '.join(missing)}" if missing else ""
