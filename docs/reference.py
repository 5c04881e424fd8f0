"""Writes the reference pages while the documents are built: the job file from its models, the commands from the CLI.

A hook of MkDocs (``mkdocs.yml``). The pages exist only in the built site, so they cannot fall behind the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from lazytrain.jobs.spec import JobSpec
from lazytrain.platform.cli.app import app

_PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false"}
_WORDS = {"None": "null", "True": "true", "False": "false"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, text in (("job-file.md", job_file()), ("commands.md", commands())):
        files.append(File.generated(config, name, content=text))
    return files


# ---- the job file


def job_file() -> str:
    """Every section and key of a job file."""
    parts = ["# The job file", "", "Every key may be set on the command line too: `--set train.batch=8`."]
    parts += ["A key that is not listed here is refused, with the nearest name.", ""]
    for path, model in _sections(JobSpec, ""):
        parts += [f"## {path or 'Top level'}", "", (model.__doc__ or "").strip(), "", *_table(model), ""]
    return "\n".join(parts)


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None:
            listed = "[]" if get_origin(field.annotation) in (tuple, list) else ""
            yield from _sections(inner, f"{path}.{name}{listed}" if path else f"{name}{listed}")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds: itself, optional or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [_model_in(argument) for argument in get_args(annotation) if argument is not annotation]
    return next((model for model in found if model is not None), None)


def _table(model: type[BaseModel]) -> list[str]:
    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `{name}` | {_cell(_kind(field.annotation))} | {_cell(_default(field))} | {_cell(meaning)} |")
    return rows


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin in (tuple, list):
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "map"
    if origin in (UnionType, Union):
        return " or ".join(_kind(argument) for argument in arguments)
    if hasattr(annotation, "__metadata__"):
        return _kind(arguments[0])
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _PLAIN.get(annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(_yaml(item) for item in value)}]"
    return _WORDS.get(str(value), str(value))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# ---- the commands


def commands() -> str:
    """Every command with its options and an example."""
    root = typer.main.get_command(app)
    parts = ["# Commands", "", "Every command has `--json`, which prints one JSON object on stdout and nothing else."]
    parts += ["Exit codes: 0 done; 1 it ran and failed; 2 wrong usage or a file that does not validate;"]
    parts += ["3 impossible (it does not fit), with reasons.", ""]
    for path, command in _leaves(root, "lazytrain"):
        parts += _command(path, command)
    return "\n".join(parts)


def _leaves(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, child in inner.items():
        yield from _leaves(child, f"{path} {name}")


def _command(path: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [f"## {path.removeprefix('lazytrain ')}", "", f"    {path} {usage}", "", (command.help or "").strip(), ""]
    options = [p for p in command.params if p.param_type_name == "option" and not getattr(p, "hidden", False)]
    if options:
        parts += ["| option | meaning |", "| --- | --- |"]
        parts += [f"| `{', '.join(option.opts)}` | {_cell(getattr(option, 'help', '') or '')} |" for option in options]
    return [*parts, "", *_example(command.epilog or ""), ""]


def _example(epilog: str) -> list[str]:
    lines = [line.strip() for line in epilog.replace("[bold]", "").replace("[/bold]", "").splitlines() if line.strip()]
    return [f"    {line.removeprefix('Example:').strip()}" for line in lines if line.removeprefix("Example:").strip()]
