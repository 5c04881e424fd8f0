"""Planning on request, one question at a time, in the planning process."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ...jobs.errors import LazytrainError, NotFound, TooMany
from ...jobs.frozen import digest
from ..admission import Admission, AdmissionOrder, Answer, Found, Planner, Question
from ..schemas import PlanAnswer, PlanWay
from ..store import Node

_LONGEST_S = 120.0
_POLL_S = 0.05
_MOST_WAITING = 4
_MOST_ANSWERS = 64


class Plans:
    """Answers questions of many threads with one planner."""

    def __init__(self, planner: Planner, cache: str) -> None:
        self._planner = planner
        self._cache = cache
        self._alone = threading.Lock()
        self._answers: dict[str, dict[str, Any]] = {}
        self._places = threading.BoundedSemaphore(_MOST_WAITING)

    def ask(self, spec: Mapping[str, Any], nodes: Sequence[Node]) -> PlanAnswer:
        """Plan ``spec`` for the measured nodes.

        Raises NotFound when no node is measured, TooMany when others ask already, and what is wrong with the job.
        """
        profiles = {node.kind: node.profile for node in nodes if node.profile}
        if not profiles:
            raise NotFound("no node has been measured yet", hint="lazytrain nodes shows them")
        name = f"question-{uuid.uuid4().hex}"
        found = self._wait_for(AdmissionOrder(job=name, spec=spec, profiles=profiles, cache=self._cache))
        assert isinstance(found, Admission)
        return _answer(found)

    def question(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a question of this kind (see `admission.questions`). Raises TooMany, and what is wrong with it.

        The same question is answered from memory for a while.
        """
        name = f"{kind}-{digest(kind, values)}"
        if name not in self._answers:
            found = self._wait_for(Question(job=name, kind=kind, values=values))
            assert isinstance(found, Answer)
            self._answers[name] = found.values
            while len(self._answers) > _MOST_ANSWERS:
                self._answers.pop(next(iter(self._answers)))
        return self._answers[name]

    def close(self) -> None:
        """End the planning process."""
        self._planner.close()

    def _wait_for(self, order: AdmissionOrder | Question) -> Found:
        if not self._places.acquire(blocking=False):
            raise TooMany("others are planning", hint="try again in a minute")
        try:
            with self._alone:
                return self._ask(order)
        finally:
            self._places.release()

    def _ask(self, order: AdmissionOrder | Question) -> Found:
        self._planner.submit(order)
        deadline = time.monotonic() + _LONGEST_S
        while time.monotonic() < deadline:
            found = self._planner.results().get(order.job)
            if isinstance(found, LazytrainError):
                raise found
            if found is not None:
                return found
            time.sleep(_POLL_S)
        raise LazytrainError(f"no plan within {_LONGEST_S:g} s", hint="lower plan.solve_seconds")


def _answer(found: Admission) -> PlanAnswer:
    ways = {
        kind: PlanWay(
            tokens_per_s=way.option["tokens_per_s"],
            seconds=way.option["startup_s"] + way.option["work_tokens"] / way.option["tokens_per_s"],
            host_bytes=way.option["host_bytes"],
            nvme_bytes=way.option["nvme_bytes"],
            policy=way.policy,
        )
        for kind, way in found.ways.items()
    }
    return PlanAnswer(
        feasible=bool(ways),
        batch=found.batch,
        steps=found.steps,
        ways=ways,
        limits=found.limits,
        reasons=list(found.reasons),
        notes=list(found.notes),
    )
