"""Writes the pages about the service while the documents are built: REST API, settings, error codes.

A hook of MkDocs (``mkdocs.yml``), as `reference`.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import ByteSize

from lazytrain.jobs.errors import LazytrainError
from lazytrain.jobs.units import format_bytes
from lazytrain.platform.api import create_app
from lazytrain.platform.settings import PREFIX, Settings

Schema = dict[str, Any]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, text in (("api.md", api()), ("settings.md", settings()), ("errors.md", errors())):
        files.append(File.generated(config, name, content=text))
    return files


# ---- the API

_BEFORE = """# API

The service's REST interface, under `http://127.0.0.1:8470/api/v1` unless [the settings](settings.md) say otherwise.
`lazytrain` itself uses nothing else, and so may you: `lazytrain.platform.client.Client` is it in Python, with types.

- Every request needs a token, `Authorization: Bearer TOKEN`, also on the loopback address. The first user's is in
  `~/.lazytrain/token`; an admin makes others ([running a lab](lab.md)).
- A body is JSON and says so (`Content-Type: application/json`).
- An error is `{"error": {"code", "message", "hint", "field"}}`, with a status to match.
- Submitting twice with the same `Idempotency-Key` makes one job.
- The machine-readable description is at `/api/openapi.json`.

    curl -H "Authorization: Bearer $(cat ~/.lazytrain/token)" http://127.0.0.1:8470/api/v1/queue
"""


def api() -> str:
    """Every route and every type of the API."""
    # Nothing is asked of the database or the planner: a description needs neither.
    document = create_app(None, Settings(), None).openapi()  # type: ignore[arg-type]
    parts = [_BEFORE, "## Requests", ""]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            parts += _route(f"{method.upper()} {path}", route)
    parts += ["## Types", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += _type(name, schema)
    return "\n".join(parts)


def _route(title: str, route: Schema) -> list[str]:
    parts = [f"### {title}", "", " ".join(route.get("description", route["summary"]).split()), ""]
    if parameters := route.get("parameters"):
        parts += ["| parameter | in | value | meaning |", "| --- | --- | --- | --- |"]
        for each in parameters:
            need = "" if each.get("required") else ", optional"
            meaning = _cell(each.get("description", ""))
            parts.append(f"| `{each['name']}` | {each['in']} | {_kind(each['schema'])}{need} | {meaning} |")
        parts.append("")
    if "requestBody" in route:
        parts += [f"Body: {_content(route['requestBody'])}.", ""]
    good = [(status, answer) for status, answer in route["responses"].items() if status < "400"]
    return [*parts, *(f"Answers {status}: {_content(answer)}." for status, answer in good), ""]


def _content(body: Schema) -> str:
    content = body.get("content", {})
    return " or ".join(_kind(each.get("schema", {})) or kind for kind, each in content.items()) or "nothing"


def _type(name: str, schema: Schema) -> list[str]:
    parts = [f"### {name}", "", " ".join(schema.get("description", "").split()), ""]
    if "properties" not in schema:
        return [*parts, _kind(schema), ""]
    parts += ["| field | value | meaning |", "| --- | --- | --- |"]
    for field, inner in schema["properties"].items():
        need = "" if field in schema.get("required", ()) else ", optional"
        parts.append(f"| `{field}` | {_kind(inner)}{need} | {_cell(inner.get('description', ''))} |")
    return [*parts, ""]


def _kind(schema: Schema) -> str:
    """A type in words; names of other types are links."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if choices := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(_kind(each) for each in choices)
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {})) or 'anything'}"
    return str(schema.get("type", ""))


# ---- the settings


def settings() -> str:
    """Every setting with its default and what stands below it in the source."""
    parts = ["# Settings", "", "Of the service and of `lazytrain doctor`, each read from the environment. An unknown"]
    parts += [f"`{PREFIX}*` variable is refused, with the nearest name.", ""]
    parts += ["| variable | default | meaning |", "| --- | --- | --- |"]
    for name, meaning in _meanings().items():
        default = Settings.model_fields[name].get_default(call_default_factory=True)
        shown = "`~/.lazytrain`" if name == "home" else _value(default)
        parts.append(f"| `{PREFIX}{name.upper()}` | {shown} | {_cell(meaning)} |")
    return "\n".join(parts) + "\n"


def _meanings() -> dict[str, str]:
    """The sentence below each field."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(Settings)).body if isinstance(node, ast.ClassDef))
    found = {}
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            found[field.target.id] = " ".join(ast.literal_eval(after.value).split()).replace("``", "`")
    return found


def _value(value: object) -> str:
    if value in (None, "", ()):
        return "none"
    if isinstance(value, ByteSize):
        return f"`{format_bytes(value)}`"
    return f"`{value}`" if isinstance(value, str | int | float | Path) else f"`{value!r}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---- the errors


def errors() -> str:
    """Every code with the command line's exit code and what the class says of itself."""
    parts = ["# Error codes", "", "The `code` of an error, on the command line with `--json`, in the API's answers and"]
    parts += ["in a failed job's outcome. What to do stands in its `hint`, and in [the handbook](failures.md).", ""]
    parts += ["| code | exit code | meaning |", "| --- | --- | --- |"]
    for kind in family(LazytrainError):
        meaning = _cell((kind.__doc__ or "").split("\n\n")[0].replace("``", "`").partition(" (see `interfaces`")[0])
        parts.append(
            f"| `{kind.code}` | {kind.exit_code} | {meaning if kind is not LazytrainError else 'Another error.'} |"
        )
    return "\n".join(parts) + "\n"


def family(kind: type[LazytrainError]) -> list[type[LazytrainError]]:
    """The class and all below it."""
    return [kind, *(below for child in kind.__subclasses__() for below in family(child))]
