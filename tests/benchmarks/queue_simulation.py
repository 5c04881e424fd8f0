"""A cluster with a queue, event by event: jobs arrive, a policy starts and stops them, neighbours slow each other.

What is true of every policy: a GPU takes one job, a node's host memory is not passed, jobs on a node share its links as
`lazytrain.schedulers.placement.sharing` says, every start costs the option's ``startup_s``, and a job that is taken off
its GPU keeps the tokens that it has trained. A job's true speed differs from the predicted one by a factor that no
policy knows before it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lazytrain.schedulers.placement import NodeState, Option, RunningJob, WaitingJob
from lazytrain.schedulers.placement.sharing import speeds


@dataclass(frozen=True)
class Arrival:
    """A job of the trace."""

    job: WaitingJob
    surprise: float
    """True speed over the predicted one."""


@dataclass
class Run:
    """A job on a GPU."""

    arrival: Arrival
    option: Option
    node: str
    gpu: str
    started_s: float
    ready_s: float
    """When it has started up and trains."""
    tokens: float
    """Tokens that it still has to train."""
    speed: float = 1.0
    """Share of its own speed that its neighbours leave it."""

    @property
    def rate(self) -> float:
        """Tokens per second, now."""
        return self.option.tokens_per_s * self.arrival.surprise * self.speed

    def end_s(self, now_s: float) -> float:
        """When it ends if nothing changes."""
        return max(now_s, self.ready_s) + self.tokens / self.rate


@dataclass
class Cluster:
    """The state that a policy sees."""

    nodes: tuple[NodeState, ...]
    now_s: float = 0.0
    waiting: dict[str, WaitingJob] = field(default_factory=dict)
    """Jobs in the order of their arrival, with options that say what is left to do."""
    runs: dict[str, Run] = field(default_factory=dict)

    def free_gpus(self, node: NodeState) -> list[str]:
        """Ids of the GPUs of ``node`` on which nothing runs."""
        taken = {run.gpu for run in self.runs.values() if run.node == node.name}
        return [gpu.id for gpu in node.gpus if gpu.id not in taken]

    def free_host_bytes(self, node: NodeState) -> int:
        """Host memory that the jobs on ``node`` leave."""
        return node.host_bytes - sum(run.option.host_bytes for run in self.runs.values() if run.node == node.name)

    def fits(self, job: WaitingJob, node: NodeState) -> Option | None:
        """The job's option on ``node`` if it can start there now."""
        option = job.option(node.kind)
        if option is None or not self.free_gpus(node) or option.host_bytes > self.free_host_bytes(node):
            return None
        return option

    def running(self) -> tuple[RunningJob, ...]:
        """The running jobs as placement sees them: what is left by the speed that was measured."""
        return tuple(
            RunningJob(
                id=run.arrival.job.id,
                user=run.arrival.job.user,
                priority=run.arrival.job.priority,
                node=run.node,
                gpu=run.gpu,
                option=run.option,
                started_s=run.started_s,
                waited_s=run.started_s - run.arrival.job.submitted_s,
                remaining_s=run.end_s(self.now_s) - self.now_s,
                moves=tuple(replace(option, work_tokens=run.tokens) for option in run.arrival.job.options),
            )
            for run in self.runs.values()
        )


@dataclass(frozen=True)
class Act:
    """What a policy wants done now: first jobs leave, then others start."""

    stops: tuple[str, ...] = ()
    starts: tuple[tuple[str, str, str], ...] = ()
    """Job, node and GPU; an empty GPU is the first that is free."""
    again_s: float | None = None
    """When it wants to be asked again even if nothing happens."""


class Policy(Protocol):
    """Decides after every arrival and every end."""

    def __call__(self, cluster: Cluster) -> Act: ...


@dataclass(frozen=True)
class Outcome:
    """What became of a trace under a policy."""

    completion_s: Mapping[str, float]
    """From submission to the end, by job."""
    wait_s: Mapping[str, float]
    """From submission to the first start."""
    busy_share: float
    """Part of the GPU time until the last job's end that some job held."""


def simulate(trace: Sequence[Arrival], nodes: Sequence[NodeState], policy: Policy) -> Outcome:
    """Run ``trace`` to the end. Raises RuntimeError when jobs wait, nothing runs and the policy starts nothing."""
    cluster = Cluster(tuple(nodes))
    arrivals = sorted(trace, key=lambda arrival: arrival.job.submitted_s)
    by_id = {arrival.job.id: arrival for arrival in trace}
    ended: dict[str, float] = {}
    first: dict[str, float] = {}
    held_s, place = 0.0, 0
    while len(ended) < len(arrivals):
        while place < len(arrivals) and arrivals[place].job.submitted_s <= cluster.now_s:
            cluster.waiting[arrivals[place].job.id] = arrivals[place].job
            place += 1
        act = policy(cluster)
        _apply(cluster, act, by_id)
        for name in cluster.runs:
            first.setdefault(name, cluster.now_s)
        next_s = [run.end_s(cluster.now_s) for run in cluster.runs.values()]
        next_s += [arrivals[place].job.submitted_s] if place < len(arrivals) else []
        if not next_s:
            raise RuntimeError(f"{len(cluster.waiting)} jobs wait and nothing runs")
        until_s = min([*next_s, *([act.again_s] if act.again_s is not None else [])])
        held_s += len(cluster.runs) * (until_s - cluster.now_s)
        for name in _advance(cluster, until_s):
            ended[name] = cluster.now_s
    gpus = sum(len(node.gpus) for node in nodes)
    submitted = {name: arrival.job.submitted_s for name, arrival in by_id.items()}
    return Outcome(
        completion_s={name: end - submitted[name] for name, end in ended.items()},
        wait_s={name: start - submitted[name] for name, start in first.items()},
        busy_share=held_s / (gpus * cluster.now_s),
    )


def _apply(cluster: Cluster, act: Act, by_id: Mapping[str, Arrival]) -> None:
    for name in act.stops:
        run = cluster.runs.pop(name)
        job = run.arrival.job
        options = tuple(replace(option, work_tokens=run.tokens) for option in job.options)
        cluster.waiting[name] = replace(job, options=options)
    nodes = {node.name: node for node in cluster.nodes}
    for name, where, wanted in act.starts:
        job, node = cluster.waiting[name], nodes[where]
        option = cluster.fits(job, node)
        if option is None:
            raise RuntimeError(f"{name} does not fit on {where}")
        del cluster.waiting[name]
        gpu = wanted or cluster.free_gpus(node)[0]
        ready_s = cluster.now_s + option.startup_s
        cluster.runs[name] = Run(by_id[name], option, where, gpu, cluster.now_s, ready_s, option.work_tokens)
    _share(cluster)


def _share(cluster: Cluster) -> None:
    """How fast everything runs now."""
    for node in cluster.nodes:
        roots = {gpu.id: gpu.pcie_root for gpu in node.gpus}
        here = [run for run in cluster.runs.values() if run.node == node.name]
        for run, speed in zip(here, speeds([(run.option, roots[run.gpu]) for run in here], node), strict=True):
            run.speed = speed


def _advance(cluster: Cluster, until_s: float) -> list[str]:
    """Move the clock; the jobs that end."""
    ends = {name: run.end_s(cluster.now_s) for name, run in cluster.runs.items()}
    for run in cluster.runs.values():
        trained_s = until_s - max(cluster.now_s, run.ready_s)
        run.tokens = max(0.0, run.tokens - max(0.0, trained_s) * run.rate)
    cluster.now_s = until_s
    done = [name for name, end_s in ends.items() if end_s <= until_s + 1e-6]
    for name in done:
        del cluster.runs[name]
    _share(cluster)
    return done
