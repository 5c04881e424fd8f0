"""What became of the rows: counts, and every refusal by rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_SHOWN = 3


@dataclass
class Refusal:
    """Rows of one file that break one rule."""

    file: str
    rule: str
    count: int = 0
    lines: list[int] = field(default_factory=list)
    """The first three lines."""


@dataclass
class Report:
    """Counts over all files. Tokens are those after truncation; supervised ones carry the loss."""

    formats: dict[str, str] = field(default_factory=dict)
    """Format of each file, given or detected."""
    rows: int = 0
    train_rows: int = 0
    eval_rows: int = 0
    truncated: int = 0
    """Usable rows that were cut at max_length."""
    tokens: int = 0
    supervised_tokens: int = 0
    longest: int = 0
    """Tokens of the longest row."""
    context_turns: int = 0
    """Assistant turns without loss, because the chat template writes them otherwise once more turns follow."""
    system_refused: int = 0
    """Rows refused for their system turn."""
    pairs: bool = False
    """Whether rows are preference pairs: two sequences each, the chosen one first."""
    packed: bool = False
    """Whether rows share sequences."""
    packing_refused: str = ""
    """Why rows do not share sequences although they might."""
    fingerprint: str = ""
    """Changes with any content of the files, the tokenizer, its template and the options of the section data."""
    cache_key: str = ""
    """Name of the folder in the cache that holds the rows."""
    refusals: list[Refusal] = field(default_factory=list)

    @property
    def refused(self) -> int:
        """Rows that cannot be used."""
        return sum(refusal.count for refusal in self.refusals)

    def count(self, tokens: int, supervised: int, *, truncated: bool) -> None:
        """Count a usable row."""
        self.tokens += tokens
        self.supervised_tokens += supervised
        self.truncated += truncated
        self.longest = max(self.longest, tokens)

    def refuse(self, file: str, line: int, rule: str) -> None:
        """Count a row that cannot be used."""
        found = next((entry for entry in self.refusals if (entry.file, entry.rule) == (file, rule)), None)
        if found is None:
            found = Refusal(file, rule)
            self.refusals.append(found)
        found.count += 1
        if len(found.lines) < _SHOWN:
            found.lines.append(line)

    def table(self) -> str:
        """The refusals, one rule a line: rows, rule, file with the first lines; empty when there are none."""
        return "\n".join(
            f"{entry.count:>8}  {entry.rule}  ({entry.file}, line {', '.join(map(str, entry.lines))}"
            f"{', ...' if entry.count > len(entry.lines) else ''})"
            for entry in sorted(self.refusals, key=lambda entry: -entry.count)
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """The report that `to_dict` gave."""
        known = {entry.name for entry in fields(cls)}
        given = {key: value for key, value in values.items() if key in known}
        return cls(**{**given, "refusals": [Refusal(**refusal) for refusal in values["refusals"]]})

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {**asdict(self), "refused": self.refused}
