"""What a source of a job file stands for: one file, the files of a folder, an entry of a registry, or the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..spec import Source
from .read import Row, read_rows
from .registry import REGISTRY, Entry, find_entry

_HUB = "hf://"
_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".jsonl.gz", ".json.gz", ".ndjson.gz")


@dataclass(frozen=True)
class Input:
    """One file, or one data set of the hub, with how its rows are read."""

    label: str
    """How reports name it."""
    format: str
    path: Path | None = None
    hub: Any = None
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    source: int = 0
    """Index of the source in the job file's list."""

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Line and row, as `read_rows` gives them, under the keys that formats expect."""
        plain = enumerate(self.hub, start=1) if self.path is None else read_rows(self.path)
        if not self.columns and not self.tags:
            yield from plain
            return
        entry = Entry(columns=self.columns, tags=self.tags)
        for line, row in plain:
            yield line, entry.rename(row) if isinstance(row, dict) else row

    def digest(self) -> str:
        """Digest of the content; empty for a file that cannot be read (reading its rows will say why)."""
        if self.path is None:
            return str(self.hub._fingerprint)
        try:
            if not self.path.is_file():
                return ""
            with self.path.open("rb") as file:
                return _sha256(file)
        except OSError:
            return ""


def inputs(source: Source, index: int) -> list[Input]:
    """What the source stands for. Raises DataError for an empty folder, a pipe, an unknown entry, an unreachable
    hub."""
    path = Path(source.path)
    if path.name == REGISTRY or (source.name is not None and (path / REGISTRY).is_file()):
        return _from_registry(source, index, path if path.name == REGISTRY else path / REGISTRY)
    if path.is_dir():
        return [Input(str(file), source.format, file, columns=source.columns, source=index) for file in _files(path)]
    if source.path.startswith(_HUB):
        return [
            _from_hub(
                source.path.removeprefix(_HUB), source.name, source.part, source.format, source.columns, {}, index
            )
        ]
    return [Input(source.path, source.format, _file(path), columns=source.columns, source=index)]


def _from_registry(source: Source, index: int, registry: Path) -> list[Input]:
    entry = find_entry(registry, source.name)
    columns = {**entry.columns, **source.columns}
    name_of_format = entry.format if source.format == "auto" else source.format
    if entry.hub is not None:
        part = entry.part or source.part
        return [_from_hub(entry.hub, entry.subset, part, name_of_format, columns, entry.tags, index)]
    path = registry.parent / entry.file
    files = _files(path) if path.is_dir() else [_file(path)]
    return [Input(str(file), name_of_format, file, columns=columns, tags=entry.tags, source=index) for file in files]


def _file(path: Path) -> Path:
    """The path, unless it is a pipe or a device: those can be read once, or wait for whoever writes to them."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: is no file but a pipe or a device", hint="write the rows to a file first")
    return path


def _files(folder: Path) -> list[Path]:
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name.endswith(_SUFFIXES) and path.name != REGISTRY and not _hidden(path, folder)
    )
    if not files:
        raise DataError(f"{folder}: no data file in this folder", hint=f"data files end in {', '.join(_SUFFIXES)}")
    return files


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _from_hub(
    name: str,
    subset: str | None,
    part: str,
    name_of_format: str,
    columns: Mapping[str, str],
    tags: Mapping[str, str],
    index: int,
) -> Input:
    import datasets  # takes a second to import, and files need none of it

    try:
        rows = datasets.load_dataset(name, subset, split=part)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"cannot read {name} from the hub: {_first_line(error)}",
            hint="without network, name files that are on this machine",
        ) from error
    return Input(f"{name}[{part}]", name_of_format, hub=rows, columns=columns, tags=tags, source=index)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _sha256(file: Any) -> str:
    sha = hashlib.sha256()
    while block := file.read(1 << 20):
        sha.update(block)
    return sha.hexdigest()
