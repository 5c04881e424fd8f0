"""A YAML file as plain values that still know their lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..errors import SpecError

MAX_BYTES = 256 << 10
_MAX_NODES = 20_000
_MAX_DEPTH = 30

Location = tuple[str | int, ...]
"""Path to a value: keys of mappings and indices of lists."""


_PLAIN = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
"""Unquoted words that are no strings: the core schema of YAML 1.2 (section 10.3.2), without its ``0o7`` and ``0xF``."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2: ``1e-5`` is a number, ``010`` is ten, and ``no``, ``1:30`` and ``2026-11-30`` are words.

    By PyYAML's own rules, those of version 1.1, they are a word, eight, False, ninety and a date.
    """


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern in _PLAIN.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})$"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))


@dataclass
class Document:
    """Values of a job file, with the line (from 1) of each; 0 marks a value that ``--set`` gave."""

    file: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[Location, int] = field(default_factory=dict)

    def line(self, location: Location) -> int:
        """Line of the value, or of the innermost mapping or list that would hold it."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 0)

    def get(self, location: Location) -> Any:
        """The value there, or None."""
        value: Any = self.values
        for part in location:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def set(self, location: Location, value: Any) -> None:
        """Replace a value that is there."""
        self.get(location[:-1])[location[-1]] = value

    def error(self, location: Location, message: str, *, hint: str = "") -> SpecError:
        """A SpecError that names file, line and field."""
        line, name = self.line(location), dotted(location)
        place = f"{self.file}:{line}" if line else f"--set {name}" if location else self.file
        text = f"{place}: {name}: {message}" if line and name else f"{place}: {message}"
        return SpecError(text, field=name, line=line, hint=hint)


def dotted(location: Location) -> str:
    """``("data", "train", 0, "path")`` becomes ``data.train[0].path``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def read_document(path: str | Path) -> Document:
    """Read a YAML mapping. Raises SpecError if it is unreadable, over 256 KiB, no text, no YAML, or has a key twice."""
    return parse_document(_read(Path(path)), str(path))


def parse_document(content: bytes | str, path: str) -> Document:
    """The YAML mapping that a text says; ``path`` is what errors call it. Raises SpecError as `read_document` does."""
    if len(content) > MAX_BYTES:
        raise SpecError(f"{path}: larger than {MAX_BYTES:,} bytes", hint="a job file is a short text")
    document = Document(path)
    try:
        loader = _Loader(content)
        node = loader.get_single_node()
        if node is None:
            raise SpecError(f"{path}: the job file is empty", hint="it needs at least model.path and data.train")
        values = _Builder(document, loader).build(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 0
        raise SpecError(f"{path}:{line}: not valid YAML: {error.problem or error.context}", line=line) from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise SpecError(f"{path}: not a text file", hint="a job file is YAML in UTF-8") from error
    except RecursionError as error:
        raise SpecError(f"{path}: too large or nested too deeply for a job file") from error
    if not isinstance(values, dict):
        raise SpecError(f"{path}:1: a job file is a mapping of keys, this is {_kind(values)}", line=1)
    document.values = values
    return document


def read_yaml(text: str) -> Any:
    """The value that a text says by the rules of a job file. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, RecursionError) as error:
        raise yaml.YAMLError(str(error)) from error


def override(document: Document, setting: str) -> None:
    """Apply ``a.b=c`` (lists by index: ``data.train.0.path=x``), ``c`` being YAML. Raises SpecError."""
    name, separator, text = setting.partition("=")
    parts = [part for part in re.split(r"[.\[\]]+", name.strip()) if part]
    if not separator or not parts:
        raise SpecError(f"--set {setting}: not of the form section.key=value", hint="for example --set train.batch=16")
    location: Location = tuple(int(part) if part.isdecimal() else part for part in parts)
    try:
        value = read_yaml(text)
    except yaml.YAMLError as error:
        raise SpecError(f"--set {setting}: the value is not valid YAML", field=dotted(location)) from error
    _insert(document, location, value)
    document.lines = {at: line for at, line in document.lines.items() if at[: len(location)] != location}
    document.lines[location] = 0


def _insert(document: Document, location: Location, value: Any) -> None:
    holder: Any = document.values
    for depth, part in enumerate(location[:-1], start=1):
        if isinstance(holder, dict):
            if holder.get(part) is None:
                holder[part] = {}
            holder = holder[part]
        elif isinstance(holder, list) and isinstance(part, int) and part < len(holder):
            holder = holder[part]
        else:
            raise SpecError(f"--set {dotted(location)}: there is no {dotted(location[:depth])}", field=dotted(location))
    last = location[-1]
    if isinstance(holder, list) and isinstance(last, int) and last <= len(holder):
        holder[last : last + 1] = [value]
    elif isinstance(holder, dict):
        holder[last] = value
    else:
        raise SpecError(f"--set {dotted(location)}: there is no such place", field=dotted(location))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise SpecError(f"{path}: no such job file", hint=f"the current folder is {Path.cwd()}") from error
    except IsADirectoryError as error:
        raise SpecError(f"{path}: is a folder, not a job file") from error
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from error
    if len(content) > MAX_BYTES:
        raise SpecError(
            f"{path}: larger than 256 KiB, so not a job file", hint="rows belong into the files of data.train"
        )
    return content


class _Builder:
    """Turns nodes into values, refusing repeated keys and anchors that blow up."""

    def __init__(self, document: Document, loader: _Loader) -> None:
        self._document = document
        self._loader = loader
        self._nodes = 0

    def build(self, node: yaml.Node, location: Location) -> Any:
        self._nodes += 1
        if self._nodes > _MAX_NODES or len(location) > _MAX_DEPTH:
            raise RecursionError
        line = node.start_mark.line + 1
        self._document.lines.setdefault(location, line)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, location)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*location, index)) for index, item in enumerate(node.value)]
        try:
            return self._loader.construct_object(node)
        except ValueError as error:
            raise self._document.error(location, f"not a valid value: {error}") from error

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            here, line = (*location, key), key_node.start_mark.line + 1
            if key in values:
                first = self._document.lines[here]
                self._document.lines[here] = line
                raise self._document.error(here, f"the key is here twice, first in line {first}")
            self._document.lines[here] = line
            values[key] = self.build(value_node, here)
        return values


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else "nothing" if isinstance(value, Mapping) else "a single value"
