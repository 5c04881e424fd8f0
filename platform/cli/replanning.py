"""Another policy for a run of ``lazytrain train`` whose machine is not as fast as planned, as jobs of a service get it.

The run records a few steps once in a while. Each time they are looked at in a planning process of its own, which ends
with its answer: how far off the prediction was, and maybe a policy, which is left where the run takes it up between two
steps.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from ...jobs.errors import LazytrainError
from ...jobs.policy import Policy
from ...jobs.run_directory import RunDirectory, write_atomically
from ..admission import Answer, Found, Planner, Question, ends_soon

log = logging.getLogger(__name__)
_NAME: Final = "drift"


class Replanning:
    """Hears the reports of a run."""

    def __init__(
        self,
        directory: RunDirectory,
        known: Mapping[str, Any],
        start_planner: Callable[[], Planner],
        say: Callable[[str], None],
    ) -> None:
        """``known`` is what `plan_for_drift` has to know beside policy and steps; ``say`` tells the person."""
        self._directory, self._known, self._start_planner, self._say = directory, known, start_planner, say
        self._planner: Planner | None = None
        self._seen = self._recorded_at()
        self._step_s = 0.0
        self._calibrated = False

    def hear(self, record: Mapping[str, float]) -> None:
        """A report of the training loop."""
        self._step_s = record.get("step_s", self._step_s)
        if self._planner is not None:
            for answer in self._planner.results().values():
                self.close()
                self._take_up(answer)
            return
        recorded = self._recorded_at()
        if recorded == self._seen or ends_soon(record["total_steps"] - record["step"], self._step_s):
            return
        self._seen = recorded
        self._planner = self._start_planner()
        policy = Policy.load(self._directory.policy).model_dump(mode="json", by_alias=True)
        values = {**self._known, "policy": policy, "steps": str(self._directory.steps)}
        self._planner.submit(Question(job=_NAME, kind="drift", values=values))

    def close(self) -> None:
        """End the planning process, if there is one."""
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _take_up(self, answer: Found) -> None:
        if not isinstance(answer, Answer):
            if isinstance(answer, LazytrainError):
                log.warning("the run is not planned for what it measured: %s", answer)
            return
        if calibration := answer.values["calibration"]:
            self._keep(calibration)
        if words := answer.values["words"]:
            log.info("planned again: %s", words)
            self._say(words)
        if answer.values["policy"] is not None:
            policy = Policy.model_validate(answer.values["policy"])
            write_atomically(self._directory.next_policy, policy.to_json())

    def _keep(self, calibration: Mapping[str, Any]) -> None:
        """Beside the run; the first one is told, for those that follow are much like it."""
        write_atomically(self._directory.calibration, json.dumps(calibration, allow_nan=False))
        log.info("calibrated: %s", calibration["sentence"])
        if not self._calibrated:
            self._say(calibration["sentence"])
        self._calibrated = True

    def _recorded_at(self) -> float | None:
        try:
            return self._directory.steps.stat().st_mtime
        except OSError:
            return None
