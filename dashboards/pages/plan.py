"""Planning before anything is submitted: what fits where, why, how fast, and how the planners compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup
from pydantic import ValidationError
from starlette.responses import Response
from starlette.routing import Route

from ...jobs.errors import Forbidden, InputError, LazytrainError
from ...platform import facts
from ...platform.schemas import NodeView, ShapeAnswer, ShapeQuestion
from ...schedulers import drawing
from ...schedulers.hardware import known_gpus, known_models
from ..web import Visit, page

PLANNERS = {
    "full": "everything the executor can do",
    "paper": "the LazyTrain paper's",
    "megatrain": "MegaTrain's fixed rule",
    "every_layer": "every boundary kept",
    "keep_all": "everything kept",
}
_WORDS = {
    "full": "full search",
    "paper": "paper",
    "megatrain": "MegaTrain",
    "every_layer": "every layer",
    "keep_all": "keep all",
}
_DEFAULTS = {
    "model": "qwen2.5-7b",
    "gpu": "",
    "batch": "8",
    "length": "1024",
    "dtype": "bfloat16",
    "planner": "full",
    "gpu_memory": "",
    "host_memory": "",
    "nvme": "",
    "solve_seconds": "10",
}


def plan(visit: Visit) -> Response:
    """The form, and with ``ask`` in the address the answer below it."""
    if not visit.may("submitter"):
        raise Forbidden(f"{visit.user.name} is a {visit.user.role}; planning needs the role submitter")
    nodes: list[NodeView] = visit.read("nodes")
    here = list(dict.fromkeys(node.kind for node in nodes if node.measured))
    values = {**_DEFAULTS, "gpu": (here or ["H800"])[0]}
    values |= {name: text.strip() for name, text in visit.request.query_params.items() if name in values}
    asked = bool(visit.asked("ask"))
    return visit.show(
        "plan.html",
        values=values,
        here=here,
        known=[gpu for gpu in known_gpus() if gpu not in here],
        models=known_models(),
        planners=PLANNERS,
        asked=asked,
        **(_answered(visit, values) if asked and visit.part != "form" else {"answer": None, "error": None}),
    )


def _answered(visit: Visit, values: Mapping[str, str]) -> dict[str, Any]:
    """The plan, or what is wrong with the question: both stand below the form, which stays as it was filled in."""
    try:
        question = _question(values)
        answer = visit.once(("shape", question.model_dump_json()), lambda: visit.client.plan_shape(question), 600.0)
    except LazytrainError as error:
        return {"answer": None, "error": error}
    predicted = answer.plan.get("predicted")
    return {
        "answer": answer,
        "error": None,
        "drawn_map": _drawn_map(answer),
        "drawn_timeline": _drawn_timeline(answer),
        "rows": list(comparison(answer)) if predicted else [],
        "job_link": "/submit?" + urlencode({"from": "plan", **{k: v for k, v in values.items() if v}}),
    }


def _question(values: Mapping[str, str]) -> ShapeQuestion:
    """The form as a question. Raises InputError in words."""
    given: dict[str, Any] = {name: text for name, text in values.items() if text}
    try:
        for name in ("batch", "length"):
            given[name] = int(given.get(name, ""))
        given["solve_seconds"] = float(given.get("solve_seconds", 10))
    except ValueError:
        raise InputError("batch and length are whole numbers, the time for solving a number") from None
    try:
        return ShapeQuestion.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{str(first['loc'][0]).replace('_', ' ')}: {first['msg']}") from None


def _drawn_map(answer: ShapeAnswer) -> Markup | str:
    policy = answer.plan.get("policy")
    return Markup(drawing.draw_policy_map(facts.map_of(policy))) if policy else ""


def _drawn_timeline(answer: ShapeAnswer) -> Markup | str:
    timeline = facts.timeline_of(answer.timeline)
    if timeline is None:
        return ""
    return Markup(drawing.draw_timelines(timeline, None, title="Predicted timeline of one step"))


def comparison(answer: ShapeAnswer) -> Iterable[dict[str, Any]]:
    """This plan and the fixed rules that fit, the fastest first, each with its speed against this plan's."""
    mine = answer.plan["predicted"]
    name = answer.plan["solver"]["planner"]
    known = {name: mine, **{rule: found for rule, found in answer.plan.get("baselines", {}).items() if rule != name}}
    for rule, found in sorted(known.items(), key=lambda item: item[1]["step_s"]):
        yield {
            "name": _WORDS.get(rule, rule),
            "this": rule == name,
            "times": mine["step_s"] / found["step_s"],
            "waits_s": sum(found["exposed_s"].values()),
            **found,
        }


routes = [Route("/plan", page(plan))]
