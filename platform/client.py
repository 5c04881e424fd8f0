"""The typed client of the REST API.

client = Client("http://127.0.0.1:8470", token)
job = client.submit("job.yaml")          # or a JobSpec, or a mapping
client.wait(job.id)
"""

from __future__ import annotations

import copy
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, RootModel

from ..jobs.errors import InputError, LazytrainError, TooMany, Unreachable, error_of
from ..jobs.policy import Policy
from ..jobs.spec import JobSpec, load_spec
from ..jobs.timeline import Timeline
from . import schemas
from .schemas import JobView

_PREFIX = "/api/v1"
_TRIES = 3
_PAUSE_S = 0.5
_PATIENCE_S = 120.0
_FINAL = ("SUCCEEDED", "FAILED", "STOPPED", "REJECTED")

Answer = TypeVar("Answer", bound=BaseModel)


class _Values(RootModel[dict[str, Any]]):
    """An answer without a form of its own."""


class Client:
    """Talks to one service. Its errors are raised as the service's own (`jobs.errors`), Unreachable if none answers."""

    def __init__(
        self, url: str, token: str, *, timeout_s: float = 150.0, handlers: Iterable[urllib.request.BaseHandler] = ()
    ) -> None:
        """``handlers`` replace the network, for a service in this process (`api.InProcess`)."""
        self._url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self._patience_s = 0.0
        # No proxy from the environment: the token is for this service alone.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)

    def patient(self, patience_s: float = _PATIENCE_S) -> Client:
        """This client, which goes on asking for so long while the service does not answer or has too much to do."""
        other = copy.copy(self)
        other._patience_s = patience_s
        return other

    # ---- jobs

    def submit(
        self, spec: JobSpec | Mapping[str, Any] | str | Path, *, after: Iterable[str] = (), key: str | None = None
    ) -> JobView:
        """Put a job into the queue; relative paths of a job file start at its folder.

        A connection that breaks is tried again with the same ``key`` (a new one by default): that makes no second job.
        """
        body = {"spec": _resolved(spec), "after": list(after)}
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        return self._ask(JobView, "POST", "/jobs", body, headers=headers)

    def job(self, job_id: str) -> JobView:
        """One job, with its job file. Raises NotFound."""
        return self._ask(JobView, "GET", f"/jobs/{_quoted(job_id)}")

    def jobs(self, *, states: Iterable[str] = (), owner: str | None = None, limit: int | None = None) -> list[JobView]:
        """Jobs, newest first; at most ``limit``."""
        found: list[JobView] = []
        before: str | None = None
        while limit is None or len(found) < limit:
            size = min(1000, limit - len(found)) if limit is not None else 1000
            query = {"state": list(states), "owner": owner, "limit": size, "before": before}
            page = self._ask(schemas.JobPage, "GET", "/jobs", query=query)
            found += page.jobs
            before = page.next
            if before is None:
                break
        return found

    def wait(self, job_id: str, *, timeout_s: float = float("inf"), every_s: float = 0.5) -> JobView:
        """The job once it has ended. Raises LazytrainError when that takes longer than ``timeout_s``."""
        deadline, asking = time.monotonic() + timeout_s, self.patient(min(_PATIENCE_S, timeout_s))
        while (job := asking.job(job_id)).state not in _FINAL:
            if time.monotonic() > deadline:
                raise LazytrainError(f"job {job_id} is still {job.state}: {job.sentence}")
            time.sleep(every_s)
        return job

    def stop(self, *job_ids: str, all: bool = False) -> None:
        """Ask jobs to save their state and leave; ``all`` of one's own (an admin: everybody's)."""
        self._ask(schemas.Accepted, "POST", "/jobs/stop", {"ids": list(job_ids), "all": all})

    def pause(self, job_id: str, *, checkpoint: bool = False) -> str:
        """Free the GPU of a running job; says why not, or nothing.

        Its state stays in its node's memory until another job needs that, or with ``checkpoint`` goes to disk at once.
        """
        return self._change("POST", job_id, "/pause", query={"checkpoint": "true"} if checkpoint else None)

    def resume(self, job_id: str) -> str:
        """Let a paused job go on; says why not, or nothing."""
        return self._change("POST", job_id, "/resume")

    def set_priority(self, job_id: str, priority: int) -> str:
        """Give a job another priority; says why not, or nothing."""
        return self._change("PATCH", job_id, "", {"priority": priority})

    def remove(self, job_id: str, *, files: bool = False) -> str:
        """Take an ended job off the list, and with ``files`` its folder off the disk; says why not, or nothing."""
        return self._change("DELETE", job_id, "", query={"files": str(files).lower()})

    def retry(self, job_id: str, *, fresh: bool = False) -> JobView:
        """Submit an ended job again, as a new one that goes on from its last checkpoint, or with ``fresh`` anew."""
        headers, query = {"Idempotency-Key": uuid.uuid4().hex}, {"fresh": "true"} if fresh else {}
        return self._ask(JobView, "POST", f"/jobs/{_quoted(job_id)}/retry", {}, query=query, headers=headers)

    def events(self, job_id: str, *, since: int = 0) -> list[schemas.EventView]:
        """What happened to a job after event ``since``."""
        query = {"since": since}
        return self._ask(schemas.EventPage, "GET", f"/jobs/{_quoted(job_id)}/events", query=query).events

    def log(
        self,
        job_id: str,
        *,
        tail: int | None = None,
        offset: int | None = None,
        limit: int | None = None,
        attempt: int | None = None,
    ) -> schemas.LogPart:
        """A part of what the last run printed, or the ``attempt``-th; at most ``limit`` bytes."""
        query = {"tail": tail, "offset": offset, "limit": limit, "attempt": attempt}
        return self._ask(schemas.LogPart, "GET", f"/jobs/{_quoted(job_id)}/logs", query=query)

    def follow_log(self, job_id: str, *, every_s: float = 0.5) -> Iterator[str]:
        """What the job prints, from the end of its log on, until it has ended; over all of its attempts."""
        part = self.log(job_id)
        while True:
            yield part.text
            ended = self.job(job_id).state in _FINAL
            attempt, offset = part.attempt, part.offset
            part = self.log(job_id, offset=offset)
            if part.attempt != attempt:
                part = self.log(job_id, offset=0)
            elif part.offset == offset:
                if ended:
                    return
                time.sleep(every_s)

    def metrics(self, job_id: str) -> list[dict[str, Any]]:
        """All rows of the job's metric log."""
        rows: list[dict[str, Any]] = []
        offset = 0
        while True:
            part = self.metrics_from(job_id, offset)
            rows += part.rows
            if part.offset == offset:
                return rows
            offset = part.offset

    def metrics_from(self, job_id: str, offset: int) -> schemas.MetricsPart:
        """The next rows of the metric log, from byte ``offset`` on."""
        return self._ask(schemas.MetricsPart, "GET", f"/jobs/{_quoted(job_id)}/metrics", query={"offset": offset})

    def series(self, job_id: str, names: Iterable[str], *, points: int = 400) -> schemas.SeriesAnswer:
        """Metrics of the job by name, thinned to about so many points each."""
        query = {"name": list(names), "points": points}
        return self._ask(schemas.SeriesAnswer, "GET", f"/jobs/{_quoted(job_id)}/series", query=query)

    def policy(self, job_id: str) -> Policy:
        """What was planned for the job, as it runs. Raises NotFound before it has run."""
        return self._ask(Policy, "GET", f"/jobs/{_quoted(job_id)}/policy")

    def timeline(self, job_id: str, *, predicted: bool = False) -> Timeline:
        """A step as it was measured, or as the simulator expects it. Raises NotFound where there is none yet."""
        query = {"kind": "predicted" if predicted else "measured"}
        found = self._ask(_Values, "GET", f"/jobs/{_quoted(job_id)}/timeline", query=query)
        return Timeline.from_dict(found.root)

    def checkpoints(self, job_id: str) -> list[schemas.CheckpointView]:
        """All checkpoints, by step."""
        found: list[schemas.CheckpointView] = []
        since: int | None = 0
        while since is not None:
            query = {"since": since, "limit": 1000}
            page = self._ask(schemas.CheckpointPage, "GET", f"/jobs/{_quoted(job_id)}/checkpoints", query=query)
            found += page.checkpoints
            since = page.next
        return found

    # ---- the service

    def nodes(self) -> list[schemas.NodeView]:
        """All nodes."""
        return self._ask(schemas.NodePage, "GET", "/nodes").nodes

    def drain(self, node: str, drained: bool = True, reason: str = "") -> schemas.NodeView:
        """Give a node no new jobs, or take it back into service."""
        body = {"drained": drained, "reason": reason}
        return self._ask(schemas.NodeView, "POST", f"/nodes/{_quoted(node)}/drain", body)

    def measure_again(self, node: str) -> schemas.NodeView:
        """Have a node measured anew, once nothing runs there."""
        return self._ask(schemas.NodeView, "POST", f"/nodes/{_quoted(node)}/profile", {})

    def queue(self) -> schemas.QueueView:
        """Who waits and who runs."""
        return self._ask(schemas.QueueView, "GET", "/queue")

    def plan(self, spec: JobSpec | Mapping[str, Any] | str | Path) -> schemas.PlanAnswer:
        """Where a job would fit, without running it."""
        return self._ask(schemas.PlanAnswer, "POST", "/plan", {"spec": _resolved(spec)})

    def plan_shape(self, question: schemas.ShapeQuestion) -> schemas.ShapeAnswer:
        """The plan of a model at a batch on a machine, without a job."""
        return self._ask(schemas.ShapeAnswer, "POST", "/plan/shape", question.model_dump(mode="json"))

    def me(self) -> schemas.UserView:
        """Whose token this is. Raises Unauthorized for one that nobody knows."""
        return self._ask(schemas.UserView, "GET", "/me")

    def health(self) -> schemas.Health:
        """Whether the service works."""
        return self._ask(schemas.Health, "GET", "/health")

    # ---- the wire

    def _change(
        self,
        method: str,
        job_id: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> str:
        """File a request and wait for the controller's answer."""
        asked = self._ask(schemas.Accepted, method, f"/jobs/{_quoted(job_id)}{path}", body or {}, query=query)
        deadline, pause_s = time.monotonic() + 30, 0.1
        while time.monotonic() < deadline:
            answers = [self._ask(schemas.RequestAnswer, "GET", f"/requests/{number}") for number in asked.requests]
            if all(answer.done for answer in answers):
                return "; ".join(answer.answer for answer in answers if answer.answer)
            time.sleep(pause_s)
            pause_s = min(1.0, 1.5 * pause_s)
        return "no controller has answered yet: lazytrain up starts one"

    def _ask(
        self,
        kind: type[Answer],
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        request = self._request(method, path, body, query or {}, headers or {})
        # What changes something is sent again only if a key makes that harmless.
        safe = method == "GET" or "Idempotency-key" in request.headers
        tries, deadline = (_TRIES if safe else 1), time.monotonic() + (self._patience_s if method == "GET" else 0.0)
        while True:
            tries -= 1
            try:
                return self._once(kind, request)
            except (OSError, http.client.HTTPException) as error:
                if tries <= 0 and time.monotonic() >= deadline:
                    raise Unreachable(
                        f"no service answers at {self._url}: {error}", hint="lazytrain up starts one on this machine"
                    ) from error
            except (Unreachable, TooMany):  # what the service says of its database, or of this user's other requests
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_PAUSE_S)

    def _once(self, kind: type[Answer], request: urllib.request.Request) -> Answer:
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            raise _error(error.code, error.read()) from None
        try:
            return kind.model_validate_json(content)
        except ValueError as error:
            hint = f"another program, or another version of lazytrain, answers there: {content[:60]!r}"
            raise LazytrainError(f"what answers at {self._url} is not this service", hint=hint) from error

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> urllib.request.Request:
        given = {name: value for name, value in query.items() if value is not None}
        text = urllib.parse.urlencode(given, doseq=True)
        data = json.dumps(body).encode() if body is not None else None
        return urllib.request.Request(
            f"{self._url}{_PREFIX}{path}{'?' if text else ''}{text}",
            data=data,
            method=method,
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json", **headers},
        )


def _resolved(spec: JobSpec | Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(spec, (str, Path)):
        spec = load_spec(spec)
    return spec.model_dump(mode="json") if isinstance(spec, JobSpec) else dict(spec)


def _quoted(part: str) -> str:
    return urllib.parse.quote(part, safe="")


def _error(status: int, content: bytes) -> LazytrainError:
    """The service's error, as the class that it was there."""
    try:
        body = schemas.ErrorAnswer.model_validate_json(content).error
    except ValueError:
        return LazytrainError(f"the service answered with status {status} and no reason")
    found = error_of(body.code, body.message, body.hint, body.field)
    # A request that did not validate has no class of its own here, but it is the asker's to correct.
    return InputError(found.message, hint=found.hint) if status == 422 and type(found) is LazytrainError else found
