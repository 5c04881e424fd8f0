"""A job file in the making, and what of the other trainer's file has not found a place in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from ...jobs.spec.document import Document, Location, dotted

NO_COUNT = "is no number that counts something here; the default is used"


@dataclass(frozen=True, slots=True)
class Note:
    """A key of the other file without a counterpart, or one whose counterpart means something else."""

    key: str
    line: int
    value: Any
    why: str

    def to_dict(self) -> dict[str, Any]:
        """The note as JSON values."""
        return {"key": self.key, "line": self.line, "value": self.value, "why": self.why}


@dataclass(frozen=True, slots=True)
class Conversion:
    """A job file made from another trainer's file."""

    source: str
    """``LLaMA-Factory``, ``Axolotl`` or ``MegaTrain``."""
    job: dict[str, Any]
    """Values of the job file; what is not said in the other file is left to the defaults."""
    notes: tuple[Note, ...]
    """What a person should look at, in the order of the other file's lines."""

    def to_yaml(self) -> str:
        """The job file's text."""
        return yaml.safe_dump(self.job, sort_keys=False, allow_unicode=True)


class Draft:
    """Takes keys out of a document and puts values into a job file; what was never taken becomes notes."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._taken: set[Location] = set()
        self._notes: list[Note] = []
        self.job: dict[str, Any] = {}

    def take(self, *location: str | int, default: Any = None) -> Any:
        """The value there, ``default`` where the key is absent or null; the key counts as dealt with."""
        self._taken.add(location)
        value = self.document.get(location)
        return default if value is None else value

    def count(self, *location: str | int) -> int | None:
        """A whole positive number there; anything else but null becomes a note and None."""
        value = self.take(*location)
        if type(value) is int and value > 0:
            return value
        if value is not None:
            self.note(NO_COUNT, *location)
        return None

    def put(self, name: str, value: Any) -> None:
        """Set ``section.key`` of the job file; None sets nothing."""
        if value is None:
            return
        *sections, key = name.split(".")
        holder = self.job
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[key] = value

    def move(self, name: str, *location: str | int) -> None:
        """Take a key whose counterpart means exactly the same."""
        self.put(name, self.take(*location))

    def note(self, why: str, *location: str | int) -> None:
        """Say that a key did not, or not quite, find its place."""
        self._taken.add(location)
        line, value = self.document.line(location), self.document.get(location)
        self._notes.append(Note(dotted(location), line, value, why))

    def finish(self, source: str, reasons: Mapping[str, str]) -> Conversion:
        """The conversion, with a note for every key that nobody took; keys that switch something off need none."""
        for location in self._leaves(self.document.values, ()):
            if not any(location[: len(taken)] == taken for taken in self._taken):
                self.note(
                    reasons.get(dotted(location), reasons.get(str(location[-1]), "has no counterpart")), *location
                )
        return Conversion(source, self.job, tuple(sorted(self._notes, key=lambda note: (note.line, note.key))))

    def _leaves(self, value: Any, location: Location) -> list[Location]:
        if isinstance(value, dict) and value:
            return [leaf for key, inner in value.items() for leaf in self._leaves(inner, (*location, key))]
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            return [leaf for index, item in enumerate(value) for leaf in self._leaves(item, (*location, index))]
        return [] if is_off(value) else [location]


def is_off(value: Any) -> bool:
    """Whether a value asks for nothing; 0 may ask for something, such as device 0."""
    return value is None or value is False or value == ""
