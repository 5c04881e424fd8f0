"""``dataset_info.json``: names for files and hub data sets, with the keys under which their rows say what."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DataError
from .canonical import Refused

REGISTRY = "dataset_info.json"
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
_SHAREGPT = {"messages": "conversations", "system": "system", "tools": "tools"}
_ROLE_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}


@dataclass(frozen=True)
class Entry:
    """One entry: where its rows are, their format, and how their keys are called."""

    file: str = ""
    hub: str | None = None
    subset: str | None = None
    part: str | None = None
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our key to theirs."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """``role_tag`` and ``content_tag``, and the words for roles."""

    def rename(self, row: Mapping[str, Any]) -> dict[str, Any] | Refused:
        """The row under the keys and roles that formats expect."""
        taken = {theirs for ours, theirs in self.columns.items() if ours != theirs}
        renamed = {key: value for key, value in row.items() if key not in taken}
        renamed |= {ours: row[theirs] for ours, theirs in self.columns.items() if theirs in row}
        turns = renamed.get("conversations")
        if self.tags and isinstance(turns, list):
            renamed["conversations"] = [self._turn(turn) for turn in turns]
        return renamed

    def _turn(self, turn: Any) -> Any:
        if not isinstance(turn, Mapping):
            return turn
        role, content = self.tags.get("role_tag", "from"), self.tags.get("content_tag", "value")
        words = {self.tags[tag]: word for tag, word in _ROLE_TAGS.items() if tag in self.tags}
        name = turn.get(role)
        rest = {key: value for key, value in turn.items() if key not in (role, content)}
        return {**rest, "role": words.get(name, name) if isinstance(name, str) else name, "content": turn.get(content)}


def find_entry(path: Path, name: str | None) -> Entry:
    """The entry of this name. Raises DataError when the registry or the entry cannot be used."""
    try:
        entries = json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such registry") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a registry in JSON: {error}") from error
    if not isinstance(entries, dict):
        raise DataError(f"{path}: a registry is a JSON object of named entries")
    if name is None or name not in entries or not isinstance(entries[name], dict):
        near = difflib.get_close_matches(name or "", entries, n=3) or list(entries)[:10]
        raise DataError(f"{path}: no entry {name or '(none named)'}", hint=f"set name to {', '.join(near)}")
    return _entry(path, name, entries[name])


def _entry(path: Path, name: str, values: Mapping[str, Any]) -> Entry:
    if values.get("ranking"):
        raise DataError(f"{path}: {name} holds preference pairs, not answers to learn")
    formatting = values.get("formatting", "alpaca")
    known = {"alpaca": _ALPACA, "sharegpt": _SHAREGPT}.get(formatting)
    if known is None:
        raise DataError(f"{path}: {name} has the formatting {formatting!r}", hint="known are alpaca and sharegpt")
    named = {ours: theirs for ours, theirs in (values.get("columns") or {}).items() if isinstance(theirs, str)}
    columns = {known[key]: theirs for key, theirs in named.items() if key in known}
    file, hub = values.get("file_name"), values.get("hf_hub_url")
    if not isinstance(file, str) and not isinstance(hub, str):
        raise DataError(f"{path}: {name} names neither file_name nor hf_hub_url")
    return Entry(
        file=file if isinstance(file, str) else "",
        hub=None if isinstance(file, str) else hub,
        subset=values.get("subset"),
        part=values.get("split"),
        format=formatting,
        columns=columns,
        tags=values.get("tags") or {},
    )
