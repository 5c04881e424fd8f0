"""The queue: who waits for what, who runs, and what one may change about it; and the same for jobs that have ended."""

from __future__ import annotations

import time
from collections.abc import Iterator

from markupsafe import Markup
from starlette.responses import Response
from starlette.routing import Route

from ...jobs.errors import Conflict, InputError
from ...platform import facts
from ...platform.schemas import JobView, QueueEntry, QueueView
from ...schedulers import drawing
from ..web import Visit, page

PER_PAGE = 50
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED", "REJECTED")
_ACTIONS = ("stop", "pause", "resume", "retry", "remove", "priority")


def queue(visit: Visit) -> Response:
    """Jobs that wait and run, in the order in which they go; or, on another tab, those that have ended."""
    if visit.asked("show") == "ended":
        return _ended(visit)
    found: QueueView = visit.read("queue")
    entries = list(in_order(found))
    wanted = visit.asked("find").strip().lower()
    mine = visit.asked("mine") == "yes"
    chosen = [
        (place, entry)
        for place, entry in entries
        if _matches(entry, wanted) and (not mine or entry.user == visit.user.name)
    ]
    pages = max(1, -(-len(chosen) // PER_PAGE))
    number = visit.number("page", 1, 1, pages)
    return visit.show(
        "queue.html",
        tab="queue",
        entries=chosen[(number - 1) * PER_PAGE : number * PER_PAGE],
        total=len(chosen),
        first=(number - 1) * PER_PAGE + 1,
        number=number,
        pages=pages,
        waiting=len(found.waiting),
        running=sum(entry.state != "PAUSED" for entry in found.running),
        find=visit.asked("find"),
        mine=mine,
        expected=lambda: Markup(drawing.draw_queue(facts.queue_facts(found, time.time()))),
    )


def in_order(queue: QueueView) -> Iterator[tuple[int | None, QueueEntry]]:
    """Who runs, who waits (with their place), who is paused."""
    yield from ((None, entry) for entry in queue.running if entry.state != "PAUSED")
    yield from enumerate(queue.waiting, 1)
    yield from ((None, entry) for entry in queue.running if entry.state == "PAUSED")


def _matches(entry: QueueEntry, wanted: str) -> bool:
    words = (entry.id, entry.name, entry.user, entry.node, entry.state)
    return not wanted or any(wanted in word.lower() for word in words if word)


def _ended(visit: Visit) -> Response:
    """The newest jobs that have ended, page after page."""
    number = visit.number("page", 1, 1, 1000)
    jobs: list[JobView] = visit.read("jobs", states=_ENDED, limit=number * PER_PAGE + 1)
    first = (number - 1) * PER_PAGE
    return visit.show(
        "queue.html",
        tab="ended",
        jobs=jobs[first : first + PER_PAGE],
        first=first + 1,
        number=number,
        pages=number + (len(jobs) > number * PER_PAGE),
    )


def act(visit: Visit) -> Response:
    """Do to one job what was asked for. Raises Conflict with the controller's words where that is not possible."""
    job_id, action = visit.job_id, visit.request.path_params["action"]
    if action not in _ACTIONS:
        raise InputError(f"a job cannot be told to {action}")
    if action == "retry":
        again = visit.client.retry(job_id)
        return visit.done(f"{again.name} waits as {again.id}.", f"/jobs/{again.id}", leave=True)
    refusal = _change(visit, job_id, action)
    if refusal:
        raise Conflict(refusal)
    removed = action == "remove"
    return visit.done(_DONE[action], "/queue?show=ended" if removed else f"/jobs/{job_id}", leave=removed)


_DONE = {
    "stop": "The job saves its state and leaves.",
    "pause": "The job makes room and can go on later.",
    "resume": "The job waits to go on.",
    "remove": "The job is off the list.",
    "priority": "The priority is changed.",
}


def _change(visit: Visit, job_id: str, action: str) -> str:
    """Ask for it; why not, or nothing."""
    client = visit.client
    if action == "stop":
        client.stop(job_id)
        return ""
    if action == "priority":
        text = visit.form.get("priority", "")
        if not (text.isascii() and text.isdigit() and int(text) <= 100):
            raise InputError(f"a priority is a whole number from 0 to 100, not {text or 'nothing'}")
        return client.set_priority(job_id, int(text))
    if action == "remove":
        return client.remove(job_id, files=visit.form.get("files") == "yes")
    return client.pause(job_id) if action == "pause" else client.resume(job_id)


routes = [Route("/queue", page(queue)), Route("/jobs/{job}/{action}", page(act), methods=["POST"])]
