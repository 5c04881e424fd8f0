"""Writes the page about the benchmarks while the documents are built: what each says of itself, its last result.

A hook of MkDocs (``mkdocs.yml``), as `reference`. Figures come from ``tests/benchmarks/results``, so that the page
cannot say others than those files.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

BENCHMARKS = Path(__file__).parents[1] / "tests" / "benchmarks"
RESULT = re.compile(r"(.+)-(\d{4})(\d\d)(\d\d)")

_BEFORE = """# Benchmarks

Each is one script that prints a table, or with `--json` one object; `--quick` ends within a minute on two cores and
shows that it runs, not what it finds. Ratios compare things that took turns in one run on one machine, so they carry
over to yours better than seconds do. Unless a result says otherwise it was measured on a machine without a GPU, where
the emulated device stands in for one ([why](planning.md)).

    python tests/benchmarks/optimizer.py --quick

What is listed below each benchmark is its newest result in `tests/benchmarks/results`, whole runs only, also where it
is no good news. Lists inside a result are left out here: the files have them.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated page."""
    files.append(File.generated(config, "benchmarks.md", content=benchmarks()))
    return files


def benchmarks() -> str:
    """Every script that can be run, with its newest result."""
    parts = [_BEFORE]
    for script in sorted(BENCHMARKS.glob("*.py")):
        source = script.read_text(encoding="utf-8")
        if "__main__" in source:
            parts += [f"## {script.stem}", "", _described(source), *_result(script.stem)]
    return "\n".join(parts)


def _described(source: str) -> str:
    """The script's own words, in which double backticks are code and so is what is indented."""
    words = ast.get_docstring(ast.parse(source)) or ""
    return words.replace("``", "`") + "\n"


def _result(name: str) -> list[str]:
    dated = [(match, path) for path in BENCHMARKS.glob("results/*.json") if (match := RESULT.fullmatch(path.stem))]
    mine = sorted((match[2], match[3], match[4], path) for match, path in dated if match[1] == name)
    if not mine:
        return ["No result is kept.", ""]
    year, month, day, path = mine[-1]
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = [f"| `{key}` | {shown} |" for key, value in data.items() if (shown := _shown(value))]
    notes = [data[key] for key in ("note", "conditions") if isinstance(data.get(key), str)]
    machine = data.get("machine")
    where = f", on {_words(machine)}" if machine else ""
    title = f"`{path.name}`: {year}-{month}-{day}{where}."
    return [title, "", "| key | value |", "| --- | --- |", *rows, "", *(line for note in notes for line in (note, ""))]


def _shown(value: Any) -> str:
    """A figure, or a few of them; nothing for what is too long for a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list) and 0 < len(value) <= 6 and all(isinstance(each, int | float) for each in value):
        return ", ".join(_shown(each) for each in value)
    if (
        isinstance(value, dict)
        and 0 < len(value) <= 8
        and all(isinstance(each, int | float) for each in value.values())
    ):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
    return ""


def _words(machine: Any) -> str:
    if isinstance(machine, dict):
        return ", ".join(str(value) if isinstance(value, str) else f"{value} {key}" for key, value in machine.items())
    return str(machine)
