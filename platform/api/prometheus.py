"""``/metrics``: the service in numbers, in the text format of Prometheus. It needs a token like every other address."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from ...jobs.lifecycle import JobState
from ..artifacts import read_json
from ..schemas import NodeView
from ..settings import Settings
from ..store import Store
from .access import SettingsOf, StoreOf, Viewer
from .views import node_views, progress_of

router = APIRouter(tags=["service"])

LEASE = "controller"


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(user: Viewer, store: StoreOf, settings: SettingsOf) -> Response:
    """Jobs by state, GPUs by kind, memory held, tokens per second, failures, steps of the controller; no job's name."""
    registry = CollectorRegistry()
    registry.register(_Service(store, settings))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _Service(Collector):
    """Reads store and files anew for every answer: there is nothing to keep in step with them."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        yield from self._jobs()
        yield from self._running()
        yield from _machines(node_views(self._store, self._store.nodes.list(), None))
        leader = self._store.leases.holder(LEASE, time.time())
        yield _gauge(
            "leader", "Whether a controller leads: without one, nothing is started or ended.", leader is not None
        )
        yield from _steps(self._settings.step_times_path)

    def _jobs(self) -> Iterator[Metric]:
        counts = self._store.jobs.count()
        states = GaugeMetricFamily("lazytrain_jobs", "Jobs by state.", labels=["state"])
        for state in JobState:
            states.add_metric([state.value], counts.get(state, 0))
        yield states
        failures = CounterMetricFamily("lazytrain_job_failures", "Jobs that failed, by reason.", labels=["reason"])
        for reason, count in self._store.jobs.failures().items():
            failures.add_metric([reason], count)
        yield failures
        waiting = self._store.jobs.list(states=[JobState.QUEUED])
        oldest = min((job.queued_at for job in waiting), default=None)
        waited_s = max(0.0, time.time() - oldest) if oldest is not None else 0.0
        yield _gauge("longest_wait_seconds", "Time for which the first of the waiting jobs has been queued.", waited_s)
        reasons = GaugeMetricFamily("lazytrain_waiting", "Waiting jobs by what they wait for.", labels=["reason"])
        for reason, count in Counter(job.reason for job in waiting).items():
            reasons.add_metric([reason], count)
        yield reasons

    def _running(self) -> Iterator[Metric]:
        found = [progress_of(job) for job in self._store.jobs.list(states=[JobState.RUNNING])]
        running = [progress for progress in found if progress is not None]
        rate = sum(progress.tokens_per_s or 0.0 for progress in running)
        yield _gauge("tokens_per_second", "Tokens trained per second, all running jobs together.", rate)
        ratios = [p.step_s / p.predicted_step_s for p in running if p.step_s and p.predicted_step_s]
        if ratios:
            words = "Measured over predicted step time, median of the running jobs."
            yield _gauge("step_time_over_predicted", words, statistics.median(ratios))


def _machines(nodes: list[NodeView]) -> Iterator[Metric]:
    alive = [node for node in nodes if node.alive]
    conditions = GaugeMetricFamily("lazytrain_nodes", "Nodes by condition.", labels=["condition"])
    counts = Counter("gone" if not node.alive else "drained" if node.drained else "in_service" for node in nodes)
    for condition in ("in_service", "drained", "gone"):
        conditions.add_metric([condition], counts[condition])
    yield conditions
    gpus = GaugeMetricFamily("lazytrain_gpus", "GPUs of living nodes, by kind.", labels=["kind"])
    used = GaugeMetricFamily("lazytrain_gpus_used", "GPUs that jobs hold, by kind.", labels=["kind"])
    for kind in sorted({node.kind for node in alive if node.gpus}):
        gpus.add_metric([kind], sum(node.gpus for node in alive if node.kind == kind))
        used.add_metric([kind], sum(node.busy for node in alive if node.kind == kind))
    yield from (gpus, used)
    for name, field, held in (
        ("host_memory", "host_memory_bytes", "held_host_bytes"),
        ("nvme", "nvme_bytes", "held_nvme_bytes"),
    ):
        total = sum(float(node.profile.get(field) or 0) for node in alive)
        yield _gauge(f"{name}_bytes", "Of all living nodes together.", total)
        yield _gauge(f"{name}_held_bytes", "What jobs hold of it.", sum(getattr(node, held) for node in alive))


def _steps(path: Path) -> Iterator[Metric]:
    record = read_json(path)
    if record is None:
        return
    family = HistogramMetricFamily("lazytrain_controller_step_seconds", "Seconds of the controller's steps.")
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip([*map(str, record["bounds_s"]), "+Inf"], record["counts"], strict=True):
        total += count
        buckets.append((bound, float(total)))
    family.add_metric([], buckets=buckets, sum_value=record["total_s"])
    yield family


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(f"lazytrain_{name}", words, value=float(value))
