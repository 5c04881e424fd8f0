"""Ray Tune adapter of the batch search: every probe is a real one, in a process of its own that proves it trained."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray.exceptions
from ray import tune
from ray.tune.search import Searcher
from ray.tune.stopper import Stopper

from ..jobs.errors import LazytrainError, OutOfTime
from ..jobs.model_facts import ModelFacts
from ..jobs.policy import Policy
from ..schedulers.batch_search import Objective, Probe
from ..schedulers.guided_search import GuidedSearch
from ..schedulers.planner import Plan
from .cluster.background import Background
from .cluster.failures import translate
from .cluster.inventory import list_nodes, require, selector
from .logs import write_trace
from .trial import Report

_POLL_S = 0.2
_KEY = "fits"
_NODE_LABEL = "ray.io/node-id"
_SOME_MEMORY = 1 << 20

Run = Callable[[Policy, ModelFacts], Report]
"""One probe; called in the trial's process."""


class PlanBatch(Protocol):
    """Facts and plan of a batch; called here, because a plan that does not fit needs no process to find out."""

    def __call__(self, batch: int) -> tuple[ModelFacts, Plan]: ...


@dataclass(frozen=True)
class Trial:
    """One batch that was looked at."""

    batch: int
    report: Report
    plan: Plan
    facts: ModelFacts

    def to_dict(self) -> dict[str, Any]:
        """The trial as JSON values."""
        predicted = self.plan.predicted.step_s if self.plan.predicted else None
        return {"batch": self.batch, "predicted_step_s": predicted, **asdict(self.report)}


@dataclass
class Search:
    """What a search found."""

    best: Trial
    trials: list[Trial] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SearchOrder:
    """One search. ``job_id`` is part of every name that Ray keeps, so that searches do not meet."""

    job_id: str
    plan_batch: PlanBatch
    run: Run
    low: int
    high: int
    objective: Objective = "throughput"
    """``throughput``: highest tokens/s; ``max_batch``: largest that fits."""
    most_probes: int = 4
    """Most batches that are tried; where the machine is restless, some of them once more."""
    most_seconds: float = math.inf
    """After this time no probe begins any more, once one has fitted."""
    cpus: float = 1.0
    gpus: float = 1.0
    kind: str = ""
    """Only nodes with this kind of GPU."""
    node: str = ""
    """Ray's id of the only node; the caller holds its GPU already, and ``cpus`` and ``gpus`` do not count."""
    directory: Path
    """Absolute; Ray Tune keeps its state there."""
    stop_timeout_s: float = 20.0


def search_batch(
    order: SearchOrder,
    on_trial: Callable[[Trial], None] = lambda trial: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Search:
    """Find the best batch by real probes, one after the other; ``on_trial`` hears of each in this thread.

    ``meanwhile`` is called several times a second, also here: what it raises ends the search, in the middle of a probe.
    Raises DoesNotFit when no batch fits, with the reasons of the smallest; the probe's own error when one failed for
    another reason than memory. On Ctrl-C the running probe is stopped and its reservation given back.
    """
    if not order.node:
        require(list_nodes(), {"CPU": order.cpus, "GPU": order.gpus}, order.kind)
    stopper = _OnRequest()
    searcher = _AskTell(order, stopper.stop_all)
    heard = 0

    def look() -> None:
        nonlocal heard
        meanwhile()
        for trial in searcher.trials[heard:]:
            heard += 1
            on_trial(trial)

    name = f"probe_{order.job_id}"
    try:
        call: Background[Any] = Background(_tuner(order, name, searcher, stopper).fit, "ray-tune")
        call.follow(look, every_s=_POLL_S, stop=stopper.request, patience_s=order.stop_timeout_s)
    except (ray.exceptions.RayError, tune.TuneError) as error:
        raise translate(error) from error
    return searcher.outcome()


def _tuner(order: SearchOrder, name: str, searcher: _AskTell, stopper: _OnRequest) -> tune.Tuner:
    # A bundle must not be empty: a little memory is on every node, however its cores and GPUs are taken.
    bundle = {"memory": _SOME_MEMORY} if order.node else {"CPU": order.cpus, "GPU": order.gpus}
    labels = {_NODE_LABEL: order.node} if order.node else selector(order.kind)
    return tune.Tuner(
        tune.with_resources(
            _trainable(order.run, name, order.directory / "errors"),
            tune.PlacementGroupFactory([bundle], **({"bundle_label_selector": [labels]} if labels else {})),
        ),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            num_samples=-1,
            max_concurrent_trials=1,
            reuse_actors=False,
            trial_dirname_creator=lambda trial: f"batch_{trial.config['batch']}_{trial.trial_id}",
        ),
        run_config=tune.RunConfig(name=order.job_id, storage_path=str(order.directory), verbose=0, stop=stopper),
    )


def _trainable(run: Run, name: str, traces: Path) -> Callable[[dict[str, Any]], None]:
    """What Ray Tune runs in the trial's process. Tune registers it for the whole cluster under its ``__name__``."""

    def probe(config: dict[str, Any]) -> None:
        try:
            report = run(config["policy"], config["facts"])
            tune.report({_KEY: report.fits, "report": report, "error": None})
        except LazytrainError as error:  # told to the search, which ends with it: only a process that died is a result
            tune.report({_KEY: False, "report": None, "error": error})
        except Exception as error:
            trace = write_trace(error, traces)
            ours = translate(error, trace.parent)
            tune.report({_KEY: False, "report": None, "error": ours})

    probe.__name__ = probe.__qualname__ = name
    return probe


class _OnRequest(Stopper):
    """Ends the search, and the trial that runs, when it is asked to."""

    def __init__(self) -> None:
        self._requested = False

    def request(self) -> None:
        self._requested = True

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._requested


class _AskTell(Searcher):
    """Hands the search's questions to Ray Tune, one at a time, and Ray Tune's answers to the search.

    What the search may expect of a batch is what its plan predicts. A batch whose plan does not fit is answered at
    once, without a trial.
    """

    def __init__(self, order: SearchOrder, stopped: Callable[[], bool]) -> None:
        """``stopped`` is asked before each plan, of which a dozen can take longer than whoever stops will wait."""
        super().__init__(metric=_KEY, mode="max")
        self._order, self._stopped = order, stopped
        self._search = GuidedSearch(order.low, order.high, order.objective, self._expect, order.most_probes)
        self._plans: dict[int, tuple[ModelFacts, Plan]] = {}
        self._running: dict[str, tuple[int, ModelFacts, Plan]] = {}
        self._probed: set[int] = set()
        self._began = time.monotonic()
        self._error: LazytrainError | None = None
        self.trials: list[Trial] = []

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next probe's configuration; None while one runs."""
        if self._running:
            return None
        finished: str = Searcher.FINISHED
        try:
            return self._next_probe(trial_id) or finished
        except LazytrainError as error:  # raised to the caller of the search, not inside Ray Tune
            self._error = error
            return finished

    def _next_probe(self, trial_id: str) -> dict[str, Any] | None:
        while self._error is None and not self._late():
            batch = self._search.ask()
            if batch is None or len(self._probed | {batch}) > self._order.most_probes:
                return None
            facts, plan = self._plan(batch)
            if plan.policy is not None:
                self._running[trial_id] = (batch, facts, plan)
                self._probed.add(batch)
                return {"batch": batch, "policy": plan.policy, "facts": facts}
            self._tell(Trial(batch, Report(fits=False, reason=_reasons(plan)), plan, facts))
        return None

    def _plan(self, batch: int) -> tuple[ModelFacts, Plan]:
        if self._stopped():
            raise LazytrainError("the search was asked to stop")
        if batch not in self._plans:
            self._plans[batch] = self._order.plan_batch(batch)
        return self._plans[batch]

    def _expect(self, batch: int) -> float:
        """Tokens per second that the plan of this batch predicts; 0 where there is none, in time or at all."""
        try:
            _, plan = self._plan(batch)
        except OutOfTime:  # at the very edge of what fits: not worth more time
            return 0.0
        return plan.predicted.tokens_per_s if plan.predicted is not None else 0.0

    def _late(self) -> bool:
        spent_s = time.monotonic() - self._began
        return spent_s > self._order.most_seconds and any(trial.report.fits for trial in self.trials)

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        """A trial's result; without one its process died, which is how the kernel says out of memory."""
        batch, facts, plan = self._running.pop(trial_id)
        if result is not None and result.get("error") is not None:
            self._error = result["error"]
            return
        report = result.get("report") if result is not None and not error else None
        self._tell(Trial(batch, report or Report(fits=False, reason="the process of the probe died"), plan, facts))

    def outcome(self) -> Search:
        """The answer, once the search is over."""
        if self._error is not None:
            raise self._error
        best = self._search.best.batch
        probes = [trial for trial in self.trials if trial.batch == best and trial.report.fits]
        return Search(max(probes, key=lambda trial: trial.report.tokens_per_s), self.trials)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: a search that was interrupted starts again, it takes a minute."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing was saved."""

    def __getstate__(self) -> dict[str, Any]:
        """Nothing either: Ray Tune writes its searcher to a file, and planning may hold what cannot be written."""
        return {}

    def _tell(self, trial: Trial) -> None:
        self.trials.append(trial)
        report = trial.report
        probe = Probe(report.fits, report.tokens_per_s, report.peak_device_bytes, report.reason, report.spread)
        self._search.tell(trial.batch, probe)


def _reasons(plan: Plan) -> str:
    return "no plan fits: " + ", ".join(f"{r.resource} is {r.shortfall_bytes:,} bytes short" for r in plan.reasons)
