"""The flow of ``lazytrain demo``: the whole mission, with everything real but the size."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ...jobs.data import prepare
from ...jobs.executor import Emulated
from ...jobs.frozen import digest
from ...jobs.model_facts import ModelFacts
from ...jobs.policy import Policy
from ...jobs.spec import JobSpec, load_spec
from ...jobs.tracking import create_database
from ...jobs.tracking.record import RunRecord
from ...jobs.train import Result
from ...schedulers.hardware import HardwareProfile
from ...schedulers.planner import Plan
from ..cluster import Cluster, RayCluster, Tracking, TrainingOrder
from ..logs import Reporter
from ..models import facts_of, find_model
from ..planning import Limits, Observation, calibrate, emulated, feasible_policy, make_plan, plain_training_bytes
from ..settings import Settings
from ..trial import Order, run_probe
from ..tuning import Search, SearchOrder, Trial, search_batch
from .inputs import write_inputs
from .machine import KIND, base_profile, scale_links, tight_limits

BATCH = 32
"""The GPU's memory is set so that this is the largest batch that fits."""
LOWEST_BATCH, HIGHEST_BATCH = 24, 64
EXPERIMENT = "lazytrain-demo"


@dataclass(frozen=True)
class Outcome:
    """What the demo came to; `to_dict` has the keys that ``--json`` promises."""

    result: Result
    policy: Policy
    search: Search
    profile: HardwareProfile
    """Measured, and calibrated by the probes."""
    seconds: float
    mlflow_run: str
    mlflow_uri: str
    device_budget_bytes: int
    plain_training_bytes: int

    @property
    def predicted_step_s(self) -> float:
        """What the calibrated cost model expected of a step."""
        return self.policy.predicted.step_s if self.policy.predicted else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that ``lazytrain demo --json`` ends with."""
        return {
            "exact_match_before": self.result.exact_match_before,
            "exact_match": self.result.exact_match,
            "seconds": round(self.seconds, 1),
            "boundaries": self.policy.count_homes(),
            "predicted_step_s": self.predicted_step_s,
            "measured_step_s": self.result.step_s,
            "mlflow_run": self.mlflow_run,
            "batch": self.policy.micro_batch,
            "device_budget_bytes": self.device_budget_bytes,
            "plain_training_bytes": self.plain_training_bytes,
            "peak_device_bytes": self.result.peak_gpu_bytes,
            "steps": self.result.steps,
            "loss": self.result.loss,
            "efficiency": self.profile.efficiency,
            "run_dir": self.result.run_dir,
            "mlflow_uri": self.mlflow_uri,
            "trials": [trial.to_dict() for trial in self.search.trials],
        }


OpenCluster = Callable[[Settings], Cluster]
RunSearch = Callable[[SearchOrder, Callable[[Trial], None]], Search]


def run_demo(
    directory: Path,
    settings: Settings,
    reporter: Reporter,
    *,
    seed: int = 0,
    overrides: tuple[str, ...] = (),
    open_cluster: OpenCluster | None = None,
    run_search: RunSearch = search_batch,
) -> Outcome:
    """Do everything once, in a new numbered folder below ``directory`` (absolute), and stop whatever was started.

    ``overrides`` change the job file, as ``--set`` does.
    """
    started = time.perf_counter()
    demo = _Demo(directory, reporter, seed, overrides)
    reporter.stage("starting Ray")
    opened = open_cluster(settings) if open_cluster else RayCluster(settings, kind=KIND)
    with closing(opened) as cluster:
        outcome = demo.run(cluster, run_search, settings)
    return replace(outcome, seconds=time.perf_counter() - started)


class _Demo:
    """One run of the demo: what its stages share."""

    def __init__(self, directory: Path, reporter: Reporter, seed: int, overrides: tuple[str, ...]) -> None:
        self.reporter = reporter
        self.folder = _new_folder(directory)
        self.uri = f"sqlite:///{directory / 'mlflow.db'}"
        reporter.stage("writing model, tokenizer and rows")
        self.spec = load_spec(write_inputs(self.folder, seed), overrides)
        self.data = prepare(self.spec.data, AutoTokenizer.from_pretrained(self.spec.model.path))
        self.length = self.data.train.longest
        self.model = find_model(self.spec.model.path)

    def run(self, cluster: Cluster, run_search: RunSearch, settings: Settings) -> Outcome:
        """Profile, plan, search, train."""
        self.reporter.stage("creating the MLflow database")
        create_database(self.uri, EXPERIMENT)
        self.reporter.stage("profiling: an actor measures the node")
        profile = self._profile(cluster)
        search = self._search(run_search, profile, settings, cluster)
        profile = self._scaled(self._calibrate(profile, search))
        facts, answer = self._plan(profile, search.best.batch)
        policy = feasible_policy(answer)
        result = self._train(cluster, policy, profile)
        return Outcome(
            result=result,
            policy=policy,
            search=search,
            profile=profile,
            seconds=0.0,
            mlflow_run=RunRecord.load(Path(result.run_dir) / "mlflow_run.json").run_id or "",
            mlflow_uri=self.uri,
            device_budget_bytes=int(self.limits.gpu_memory or 0),
            plain_training_bytes=plain_training_bytes(facts),
        )

    def _profile(self, cluster: Cluster) -> HardwareProfile:
        nvme = Path(self.spec.plan.nvme) if self.spec.plan.nvme else None
        if nvme is not None:
            nvme.mkdir(parents=True, exist_ok=True)
        profile = self._scaled(cluster.profile(base_profile(), nvme))
        facts = self._facts(BATCH)
        self.limits = tight_limits(facts, profile, Limits.of(self.spec))
        self.reporter.say(
            f"profiled: {profile.flops(facts.dtype) / 1e9:.3g} GFLOPS, link {profile.h2d_bytes_s / 1e6:.3g} MB/s, "
            f"optimizer {profile.update_parameters_s / 1e6:.3g} M parameters/s"
        )
        return profile

    def _scaled(self, profile: HardwareProfile) -> HardwareProfile:
        """The links of an emulated GPU follow what is known of its compute, so that its plan does not depend on it."""
        return scale_links(profile, self._facts(BATCH)) if profile.device == "emulated" else profile

    def _device(self, profile: HardwareProfile) -> str | Emulated:
        if profile.device != "emulated":
            return "cuda"
        return replace(emulated(profile), memory_bytes=int(self.limits.gpu_memory or 0))

    def _facts(self, batch: int) -> ModelFacts:
        return facts_of(self.model, batch=batch, length=self.length, dtype=self.spec.model.dtype)

    def _plan(self, profile: HardwareProfile, batch: int) -> tuple[ModelFacts, Plan]:
        facts = self._facts(batch)
        return facts, make_plan(facts, profile, self.limits)

    def _search(self, run_search: RunSearch, profile: HardwareProfile, settings: Settings, cluster: Cluster) -> Search:
        heard: list[Trial] = []
        self.reporter.stage("searching the batch: real probes, each in a process of its own")

        def on_trial(trial: Trial) -> None:
            heard.append(trial)
            self.reporter.say(_describe(trial))
            self.reporter.advance(len(heard), f"batch {trial.batch}")

        return run_search(
            SearchOrder(
                job_id=self._job_id,
                plan_batch=partial(self._plan, profile),
                run=partial(
                    run_probe,
                    Order(
                        spec=self.spec,
                        device=self._device(profile),
                        rows=self._longest_rows(),
                        seconds=settings.probe_s,
                    ),
                ),
                low=LOWEST_BATCH,
                high=HIGHEST_BATCH,
                objective="max_batch",
                cpus=sum(node.cpus for node in cluster.nodes()),
                kind=KIND,
                directory=self.folder / "tune",
                stop_timeout_s=settings.stop_timeout_s,
            ),
            on_trial,
        )

    def _longest_rows(self) -> Any:
        rows = self.data.train
        return rows.take(sorted(range(len(rows)), key=lambda i: -len(rows.input_ids[i]))[:HIGHEST_BATCH])

    def _calibrate(self, profile: HardwareProfile, search: Search) -> HardwareProfile:
        calibrated = calibrate(
            profile,
            [
                Observation(trial.facts, trial.plan.policy, trial.report.step_s)
                for trial in search.trials
                if trial.report.fits and trial.plan.policy is not None
            ],
        )
        self.reporter.say(
            f"calibrated by the probes: layers reach {calibrated.efficiency:.0%} of the matrix rate"
            f" (assumed before: {profile.efficiency:.0%})"
        )
        return calibrated

    def _train(self, cluster: Cluster, policy: Policy, profile: HardwareProfile) -> Result:
        update = {"train": self.spec.train.model_copy(update={"batch": policy.micro_batch})}
        spec: JobSpec = self.spec.model_copy(update=update)
        steps = -(-len(self.data.train) // policy.micro_batch) * spec.train.epochs
        total = min(steps, spec.train.max_steps or steps)
        self.reporter.stage("training and evaluating", total=total)

        def on_metrics(record: Mapping[str, float]) -> None:
            if "exact_match" in record:
                self.reporter.say(f"held-out exact match at step {record['step']:.0f}: {record['exact_match']:.1%}")
            elif "loss" in record:
                self.reporter.advance(record["step"], f"loss {record['loss']:.3f}")

        return cluster.train(
            TrainingOrder(
                job_id=self._job_id,
                spec=spec,
                policy=policy,
                device=self._device(profile),
                run_dir=Path(spec.output.dir),
                kind=KIND,
                tracking=Tracking(
                    uri=self.uri,
                    experiment=EXPERIMENT,
                    run_name=self._job_id,
                    params=spec.model_dump(mode="json"),
                    tags={
                        "lazytrain.job_id": self._job_id,
                        "gpu": profile.kind,
                        "policy_digest": digest(policy.model_dump(mode="json")),
                    },
                ),
            ),
            on_metrics,
        )

    @property
    def _job_id(self) -> str:
        """Unique: the same name in another folder would be another run."""
        return f"demo-{digest(str(self.folder))[:8]}-{self.folder.name}"


def _new_folder(directory: Path) -> Path:
    """``run-001``, or the next number that is free; two demos at once get two."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10**6):
        folder = directory / f"run-{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"no free run number in {directory}")


def _describe(trial: Trial) -> str:
    report = trial.report
    if not report.fits:
        return f"batch {trial.batch}: {report.reason}"
    predicted = trial.plan.predicted.step_s if trial.plan.predicted else 0.0
    return (
        f"batch {trial.batch}: {report.tokens_per_s:,.0f} tokens/s, step {report.step_s * 1e3:.0f} ms"
        f" (predicted before calibration {predicted * 1e3:.0f} ms), peak {report.peak_device_bytes:,} bytes"
    )
