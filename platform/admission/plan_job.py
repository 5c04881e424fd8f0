"""Planning one job for every kind of node that there is: what its rows need, where it fits, how fast it would be."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...jobs.errors import DoesNotFit, OutOfTime
from ...jobs.frozen import digest
from ...jobs.model_facts import ModelFacts
from ...jobs.spec import JobSpec
from ...jobs.units import format_bytes, format_needed
from ...schedulers.best_batch import Tried, best_batch
from ...schedulers.demand import demand
from ...schedulers.hardware import Budgets, HardwareProfile
from ...schedulers.options import option
from ...schedulers.planner import Plan, plan
from ..planning import Limits, emulated_fields
from .measuring import Measuring, RowFigures
from .values import Admission, AdmissionOrder, Way

_LARGEST_BATCH = 256
_STARTUP_S = 15.0
"""From the start of a run to its first step: imports, loading, evaluation before training."""


def plan_job(order: AdmissionOrder, measuring: Measuring) -> Admission:
    """Plan the job for each profile of the order, with what ``measuring`` finds out about it.

    The rows of an optimizer step are the same everywhere: those of the job file, of an earlier admission, or else those
    that train fastest on the kind of node that is fastest. Raises the typed errors of what is wrong with model or data.
    """
    spec = JobSpec.model_validate(order.spec)
    job = JobPlans(spec, order, measuring.rows(spec, order.cache), measuring)
    profiles = {kind: HardwareProfile.model_validate(fields) for kind, fields in order.profiles.items()}
    found, refused = job.plan_all(profiles)
    batch = _rows_of_a_step(found) or job.batch or 1
    return Admission(
        batch=batch,
        steps=job.steps(batch),
        ways={kind: job.way(kind, profiles[kind], tried, batch) for kind, tried in found.items()},
        limits={kind: _limit_words(error) for kind, error in refused.items()},
        reasons=next((error.reasons for error in refused.values() if isinstance(error, DoesNotFit)), ()),
        notes=tuple(job.notes()),
    )


_MADE: dict[str, Tried] = {}
"""Plans that this process has made, the oldest first: labs train the same model again and again."""
_MOST_MADE = 256


@dataclass
class JobPlans:
    """A job with what is known of its rows, and its plans for machines."""

    spec: JobSpec
    order: AdmissionOrder
    rows: RowFigures
    measuring: Measuring
    _known: dict[int, ModelFacts] = field(default_factory=dict)

    @property
    def batch(self) -> int | None:
        """Rows of a step, where they are fixed."""
        asked = self.spec.train.batch
        return self.order.batch or (None if asked == "auto" else int(asked))

    def facts(self, rows: int) -> ModelFacts:
        """Facts of the model at so many rows of the longest length; they are the same on every kind of node."""
        if rows not in self._known:
            length, dtype = self.rows.longest, self.spec.model.dtype
            self._known[rows] = self.measuring.facts(self.spec, batch=rows, length=length, dtype=dtype)
        return self._known[rows]

    def plan_all(
        self, profiles: Mapping[str, HardwareProfile]
    ) -> tuple[dict[str, Tried], dict[str, DoesNotFit | OutOfTime]]:
        """By kind of node the fastest plan, or why there is none."""
        found, refused = self._plan(profiles, self.batch)
        if self.batch is None and len(found) > 1:
            fastest = max(found, key=lambda kind: found[kind].tokens_per_s)
            rest = {kind: profiles[kind] for kind in found if kind != fastest}
            others, also_refused = self._plan(rest, _rows(found[fastest]))
            found, refused = {fastest: found[fastest], **others}, {**refused, **also_refused}
        return found, refused

    def _plan(
        self, profiles: Mapping[str, HardwareProfile], batch: int | None
    ) -> tuple[dict[str, Tried], dict[str, DoesNotFit | OutOfTime]]:
        found: dict[str, Tried] = {}
        refused: dict[str, DoesNotFit | OutOfTime] = {}
        for kind, profile in profiles.items():
            try:
                found[kind] = self._beside_others(kind, profile, batch)
            except (DoesNotFit, OutOfTime) as error:
                refused[kind] = error
        return found, refused

    def _beside_others(self, kind: str, profile: HardwareProfile, batch: int | None) -> Tried:
        """In an equal part of the node's memory, so that every GPU can have a job; in all of it if that is too little.

        Its links are not parted, because nobody knows its neighbours yet: see `together` for when there are some.
        """
        gpus = self.order.gpus.get(kind, 1)
        if gpus > 1:
            part = profile.model_copy(update={"host_memory_bytes": profile.host_memory_bytes // gpus})
            with contextlib.suppress(DoesNotFit, OutOfTime):
                return self.best_on(part, batch)
        return self.best_on(profile, batch)

    def best_on(self, profile: HardwareProfile, batch: int | None) -> Tried:
        """The fastest plan for steps of ``batch`` rows, or of as many as train fastest. Raises DoesNotFit."""
        limits, high = self._limits(profile), batch or self.largest()
        asked = self._all_that_counts(profile, batch, high, limits)
        if asked not in _MADE:
            found = best_batch(self.facts, profile, high=high, global_batch=batch, **limits).best
            if found.answer.solver is not None and found.answer.solver.out_of_time:
                return found  # next time there may be more time
            _MADE[asked] = found
            while len(_MADE) > _MOST_MADE:
                del _MADE[next(iter(_MADE))]
        return _MADE[asked]

    def _all_that_counts(self, profile: HardwareProfile, batch: int | None, high: int, limits: dict[str, Any]) -> str:
        """The same for questions with the same answer."""
        limits = {**limits, "optimizer": self.spec.optimizer.model_dump(mode="json")}
        return digest(self.facts(1).digest, batch, high, profile.model_dump(mode="json"), limits)

    def plan_at(self, profile: HardwareProfile, rows: int) -> tuple[ModelFacts, Plan]:
        """Facts and plan of steps of one micro-batch of ``rows``."""
        facts = self.facts(rows)
        return facts, plan(facts, profile, **self._limits(profile))

    def largest(self) -> int:
        """Most rows that a step may have."""
        return max(1, min(_LARGEST_BATCH, self.rows.train))

    def _limits(self, profile: HardwareProfile) -> dict[str, Any]:
        limits = Limits.of(self.spec)
        budgets = Budgets.of(profile, gpu_memory=limits.gpu_memory, host_memory=limits.host_memory, nvme=limits.nvme)
        share = self.order.memory_share
        return {
            "planner": limits.planner,
            "solve_seconds": limits.solve_seconds,
            "optimizer": limits.optimizer,
            "gpu_memory": int(min(budgets.gpu_bytes, profile.gpu_budget_bytes) * share),
            "host_memory": int(min(budgets.host_bytes, profile.host_memory_bytes) * share),
            "nvme": budgets.nvme_bytes,
        }

    def steps(self, batch: int) -> int:
        """Optimizer steps of the whole job."""
        steps = -(-self.rows.train // batch) * self.spec.train.epochs
        return min(steps, self.spec.train.max_steps or steps)

    def way(self, kind: str, profile: HardwareProfile, tried: Tried, batch: int) -> Way:
        """The plan as what placement and the run need of it."""
        policy = tried.answer.policy
        assert policy is not None
        tokens = float(self.steps(batch) * batch * self.rows.longest)
        asked = demand(policy, self.facts(tried.micro_batch), tried.answer.predicted)
        return Way(
            option=asdict(option(asked, kind=kind, work_tokens=tokens, startup_s=_STARTUP_S)),
            policy=policy.model_dump(mode="json", by_alias=True),
            device=_device(profile, self._limits(profile)["gpu_memory"]),
        )

    def notes(self) -> list[str]:
        """What the person should know about the rows, and about the model at their length."""
        refused = self.rows.refused
        about_rows = [f"{refused} rows cannot be used: lazytrain data check says why"] if refused else []
        return [*about_rows, *dict.fromkeys(note for facts in self._known.values() for note in facts.notes)]


def _rows_of_a_step(found: Mapping[str, Tried]) -> int | None:
    return next((_rows(tried) for tried in found.values()), None)


def _rows(tried: Tried) -> int:
    return tried.micro_batch * tried.accumulation


def _device(profile: HardwareProfile, gpu_bytes: int) -> dict[str, Any]:
    if profile.device != "emulated":
        return {"kind": profile.device}
    return {"kind": "emulated", **emulated_fields(profile), "memory_bytes": gpu_bytes}


def _limit_words(error: DoesNotFit | OutOfTime) -> str:
    if isinstance(error, OutOfTime):
        return "no plan was found in the time allowed (plan.solve_seconds)"
    short = [
        f"needs {format_needed(reason['needed_bytes'])} of {str(reason['resource']).replace('_', ' ')}, "
        f"has {format_bytes(reason['available_bytes'])}"
        for reason in error.reasons
    ]
    return " and ".join(short) or error.message
