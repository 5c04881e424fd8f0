"""A new job: a few fields and the job file that they make, which one may also paste, from other trainers too."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import yaml
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ...jobs.errors import Forbidden, LazytrainError, SpecError
from ...jobs.spec import check_text, read_yaml
from ...platform.convert import Conversion, convert_text
from ...platform.schemas import JobView, NodeView, PlanAnswer
from ..web import Visit, page
from .plan import PLANNERS

Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Field:
    """A field of the form, and its place in the job file."""

    place: Place
    label: str
    read: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    hint: str = ""

    @property
    def name(self) -> str:
        """Name in the form."""
        return ".".join(str(part) for part in self.place)


def _whole(text: str) -> Any:
    """A whole number, or the text itself, which the check then refuses in words."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else text


def _real(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


FIELDS: Final = (
    Field(("name",), "Name"),
    Field(("model", "path"), "Model", hint="folder or hub id"),
    Field(("data", "train", 0, "path"), "Training rows", hint="file, folder or hf:// and a hub id"),
    Field(
        ("data", "train", 0, "format"),
        "Form of the rows",
        choices=("auto", "alpaca", "question/answer", "query/response", "sharegpt", "messages", "text", "preference"),
    ),
    Field(("data", "max_length"), "Tokens of the longest row", _whole),
    Field(("train", "objective"), "Objective", choices=("sft", "dpo")),
    Field(("train", "epochs"), "Epochs", _whole),
    Field(("train", "batch"), "Rows of a step", _whole, hint="a number, or auto"),
    Field(("train", "learning_rate"), "Learning rate", _real),
    Field(("plan", "planner"), "Planner", choices=tuple(PLANNERS)),
    Field(("plan", "gpu_memory"), "GPU memory", hint="such as 70GB; empty: all"),
    Field(("plan", "host_memory"), "Host memory", hint="such as 200GiB; empty: all"),
    Field(("plan", "nvme"), "NVMe folder", hint="empty: none"),
    Field(("resources", "gpu"), "GPUs", _words, hint="kinds, separated by commas; empty: any"),
    Field(("queue", "priority"), "Priority", _whole, hint="0 to 100"),
    Field(("queue", "max_duration"), "Longest run", hint="such as 24h"),
    Field(("output", "dir"), "Folder for results", hint="empty: one of the service"),
)


def form(visit: Visit) -> Response:
    """The form with a job to begin from."""
    _need_submitter(visit)
    return _show(visit, _first_text(visit))


def _need_submitter(visit: Visit) -> None:
    if not visit.may("submitter"):
        raise Forbidden(f"{visit.user.name} is a {visit.user.role}; a new job needs the role submitter")


def _first_text(visit: Visit) -> str:
    if like := visit.asked("like"):
        job: JobView = visit.client.job(like)
        spec = dict(job.spec or {})
        return _dump({name: value for name, value in spec.items() if name != "output"})
    asked = visit.request.query_params
    job_file: dict[str, Any] = {
        "name": "my-job",
        "model": {"path": asked.get("model", "")},
        "data": {"train": [{"path": "", "format": "auto"}], "max_length": _whole(asked.get("length", "1024"))},
        "train": {"epochs": 1, "batch": "auto", "learning_rate": 1e-5},
        "plan": {"planner": asked.get("planner", "full")},
        "queue": {"priority": 50},
    }
    for name in ("gpu_memory", "host_memory"):
        if asked.get(name):
            job_file["plan"][name] = asked[name]
    if asked.get("gpu"):
        job_file["resources"] = {"gpu": [asked["gpu"]]}
    return _dump(job_file)


def take(visit: Visit) -> Response:
    """What was typed: made into text, read, planned, or submitted."""
    _need_submitter(visit)
    text = visit.form.get("text", "").replace("\r\n", "\n")
    asked = visit.form.get("do", "preview")
    try:
        if asked == "preview":
            return _show(visit, with_fields(text, visit.form))
        conversion = convert_text(text)
        if conversion is not None:
            return _show(visit, _dump(conversion.job), conversion=conversion)
        values = check_text(text)
        if asked == "plan":
            return _show(visit, text, plan=visit.client.plan(values))
        if asked == "submit":
            return _submit(visit, text, values)
        return _show(visit, text)
    except LazytrainError as error:
        return _show(visit, text, error=error)


def _submit(visit: Visit, text: str, values: Mapping[str, Any]) -> Response:
    """Into the queue. The same text of the same form makes one job, however often it is sent."""
    key = hashlib.sha256(f"{visit.form.get('key', '')}\n{text}".encode()).hexdigest()
    made = visit.client.submit(values, key=key)
    visit.state.reads.forget(visit.token)
    return RedirectResponse(f"/jobs/{made.id}", status_code=303)


def with_fields(text: str, filled: Mapping[str, str]) -> str:
    """The job file with what the fields say; a field that is empty takes its key out."""
    values = _values(text)
    for field in FIELDS:
        if field.name in filled:
            entry = filled[field.name].strip()
            _put(values, field.place, field.read(entry) if entry else None)
    return _dump(values)


def _values(text: str) -> dict[str, Any]:
    try:
        found = read_yaml(text)
    except yaml.YAMLError as error:
        raise SpecError("the text is not valid YAML, so the fields cannot change it", hint=str(error)) from None
    return found if isinstance(found, dict) else {}


def _put(values: dict[str, Any], place: Place, value: Any) -> None:
    """Set a value deep in mappings and lists, or take it out where it is None."""
    holder: Any = values
    for part, after in pairwise(place):
        fresh: Any = [] if isinstance(after, int) else {}
        if isinstance(holder, list):
            if not holder:
                holder.append(fresh)
            holder = holder[0]
        else:
            if not isinstance(holder.get(part), type(fresh)):
                if value is None:
                    return
                holder[part] = fresh
            holder = holder[part]
    if not isinstance(holder, dict):
        return
    if value is None:
        holder.pop(place[-1], None)
    else:
        holder[place[-1]] = value


def _get(values: Any, place: Place) -> Any:
    for part in place:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _dump(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)


def _show(
    visit: Visit,
    text: str,
    *,
    conversion: Conversion | None = None,
    plan: PlanAnswer | None = None,
    error: LazytrainError | None = None,
) -> Response:
    try:
        values = _values(text)
    except SpecError:
        values = {}
    nodes: list[NodeView] = visit.read("nodes")
    return visit.show(
        "submit.html",
        422 if error and not visit.by_script else 200,
        text=text,
        filled=[(field, _shown(_get(values, field.place))) for field in FIELDS],
        kinds=sorted({node.kind for node in nodes if node.kind}),
        conversion=conversion,
        plan=plan,
        error=error,
        key=visit.form.get("key") or uuid.uuid4().hex,
    )


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


routes = [Route("/submit", page(form), methods=["GET"]), Route("/submit", page(take), methods=["POST"])]
