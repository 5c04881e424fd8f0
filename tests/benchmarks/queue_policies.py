"""The queueing policies that placement is compared with. All of them see the same predictions and the same cluster.

- `fifo`: GPU-count FIFO, what a queue does that knows how many GPUs are free and not which job suits which: the oldest
  job takes any free GPU (drawn at random) on which it can run at all; while there is none, those behind it wait.
- `fifo_passing`: the same, but a job that finds no GPU lets those behind it pass.
- `shortest_first`: the job with the shortest predicted run time on a free GPU goes first, to the GPU where it is
  shortest.
- `Gavel`: max-min fairness over unlike GPUs (Narayanan et al., OSDI 2020): a linear program gives every job a share of
  time on each kind of GPU so that the smallest normalised throughput is largest; in rounds, jobs that are furthest
  behind their share get the GPUs, and whoever is not chosen leaves with its state.
- `Ours`: `lazytrain.schedulers.placement.decide`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ortools.linear_solver import pywraplp
from queue_simulation import Act, Cluster

from lazytrain.schedulers.placement import NodeState, Option, Question, Rules, WaitingJob, decide

ROUND_S = 1800.0
"""Length of Gavel's rounds; its paper takes 6 minutes, for jobs that start within seconds."""


AGAIN_S = 1800.0
"""How often placement is asked when nothing happens."""


@dataclass
class Spare:
    """GPUs and host memory that are left while a policy hands them out."""

    cluster: Cluster
    gpus: dict[str, int] = field(init=False)
    host: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.gpus = {node.name: len(self.cluster.free_gpus(node)) for node in self.cluster.nodes}
        self.host = {node.name: self.cluster.free_host_bytes(node) for node in self.cluster.nodes}

    def fits(self, job: WaitingJob, node: NodeState) -> Option | None:
        """The job's option on the node if there is room."""
        option = job.option(node.kind)
        if option is None or not self.gpus[node.name] or option.host_bytes > self.host[node.name]:
            return None
        return option

    def take(self, node: NodeState, option: Option) -> None:
        """Hand out a GPU of the node."""
        self.gpus[node.name] -= 1
        self.host[node.name] -= option.host_bytes


def fifo(cluster: Cluster) -> Act:
    """The oldest first; nobody passes."""
    return _in_order(cluster, passing=False)


def fifo_passing(cluster: Cluster) -> Act:
    """The oldest that fits first."""
    return _in_order(cluster, passing=True)


def _in_order(cluster: Cluster, *, passing: bool) -> Act:
    spare, starts = Spare(cluster), []
    draw = random.Random(f"{cluster.now_s}")
    for job in cluster.waiting.values():
        fitting = [node for node in cluster.nodes if spare.fits(job, node)]
        if fitting:
            node = draw.choices(fitting, [spare.gpus[node.name] for node in fitting])[0]
            option = spare.fits(job, node)
            assert option is not None
            spare.take(node, option)
            starts.append((job.id, node.name, ""))
        elif not passing:
            break
    return Act(starts=tuple(starts))


def shortest_first(cluster: Cluster) -> Act:
    """The shortest run time on a free GPU first."""
    spare, starts, waiting = Spare(cluster), [], dict(cluster.waiting)
    while True:
        fitting = [
            (option.seconds, job.id, node.name)
            for job in waiting.values()
            for node in cluster.nodes
            if (option := spare.fits(job, node)) is not None
        ]
        if not fitting:
            return Act(starts=tuple(starts))
        _, name, where = min(fitting)
        node = next(node for node in cluster.nodes if node.name == where)
        option = waiting.pop(name).option(node.kind)
        assert option is not None
        spare.take(node, option)
        starts.append((name, where, ""))


@dataclass
class Gavel:
    """Shares from a linear program, GPUs in rounds."""

    received_s: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """Time that a job had on a kind of GPU so far."""
    round_end_s: float = 0.0
    seen_s: float = 0.0
    shares: dict[tuple[str, str], float] = field(default_factory=dict)

    def __call__(self, cluster: Cluster) -> Act:
        kinds = {node.name: node.kind for node in cluster.nodes}
        for name, run in cluster.runs.items():
            self.received_s[name, kinds[run.node]] += cluster.now_s - self.seen_s
        self.seen_s = cluster.now_s
        if cluster.now_s + 1e-6 < self.round_end_s:
            return Act(starts=self._fill(cluster, dict(cluster.waiting)), again_s=self.round_end_s)
        self.round_end_s = cluster.now_s + ROUND_S
        jobs = dict(cluster.waiting) | {name: run.arrival.job for name, run in cluster.runs.items()}
        self.shares = max_min_shares(list(jobs.values()), cluster.nodes)
        empty = Cluster(cluster.nodes, cluster.now_s)
        wanted = {name: where for name, where, _ in self._fill(empty, jobs)}
        stops = tuple(n for n, run in cluster.runs.items() if kinds.get(wanted.get(n, "")) != kinds[run.node])
        return Act(stops=stops, starts=self._refill(cluster, stops, wanted, kinds, jobs), again_s=self.round_end_s)

    def _fill(self, cluster: Cluster, jobs: dict[str, WaitingJob]) -> tuple[tuple[str, str, str], ...]:
        """GPUs to the jobs furthest behind their share."""
        spare, starts = Spare(cluster), []
        options = {(job.id, option.kind): option for job in jobs.values() for option in job.options}
        ranked = sorted(options, key=lambda pair: (-self._priority(*pair), options[pair].seconds, pair))
        placed: set[str] = set()
        for name, kind in ranked:
            if name in placed:
                continue
            for node in cluster.nodes:
                if node.kind == kind and (option := spare.fits(jobs[name], node)) is not None:
                    spare.take(node, option)
                    starts.append((name, node.name, ""))
                    placed.add(name)
                    break
        return tuple(starts)

    def _refill(
        self,
        cluster: Cluster,
        stops: Sequence[str],
        wanted: dict[str, str],
        kinds: dict[str, str],
        jobs: dict[str, WaitingJob],
    ) -> tuple[tuple[str, str, str], ...]:
        """Starts of the chosen jobs that do not run yet; those that stay on their kind of GPU stay where they are."""
        left = Cluster(cluster.nodes, cluster.now_s, runs={n: r for n, r in cluster.runs.items() if n not in stops})
        spare, starts = Spare(left), []
        for name, where in wanted.items():
            if name in left.runs:
                continue
            for node in cluster.nodes:
                if node.kind == kinds[where] and (option := spare.fits(jobs[name], node)) is not None:
                    spare.take(node, option)
                    starts.append((name, node.name, ""))
                    break
        return tuple(starts)

    def _priority(self, name: str, kind: str) -> float:
        return self.shares.get((name, kind), 1e-3) / (self.received_s[name, kind] + 60.0)


def max_min_shares(jobs: Sequence[WaitingJob], nodes: Sequence[NodeState]) -> dict[tuple[str, str], float]:
    """Time shares by job and kind that make the smallest normalised throughput largest, then the sum of all.

    A job's throughput is normalised by what it would reach with an equal part of every GPU.
    """
    if not jobs:
        return {}
    gpus: dict[str, int] = defaultdict(int)
    for node in nodes:
        gpus[node.kind] += len(node.gpus)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    worst = solver.NumVar(0, solver.infinity(), "worst")
    objective = solver.Objective()
    objective.SetCoefficient(worst, 1.0)
    used = {kind: solver.Constraint(0, count) for kind, count in gpus.items()}
    taken: dict[tuple[str, str], pywraplp.Variable] = {}
    for job in jobs:
        equal = sum(option.tokens_per_s * min(1.0, gpus[option.kind] / len(jobs)) for option in job.options)
        reach, time = solver.Constraint(0, solver.infinity()), solver.Constraint(0, 1)
        reach.SetCoefficient(worst, -1.0)
        for option in job.options:
            share = taken[job.id, option.kind] = solver.NumVar(0, 1, "")
            reach.SetCoefficient(share, option.tokens_per_s / equal)
            time.SetCoefficient(share, 1)
            used[option.kind].SetCoefficient(share, 1)
            objective.SetCoefficient(share, 1e-4 * option.tokens_per_s / equal)
    objective.SetMaximization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise RuntimeError("the shares were not found")
    return {key: share.solution_value() for key, share in taken.items()}


@dataclass
class Ours:
    """Placement with the lab's default rules, except those that are given."""

    rules: Rules = field(default_factory=Rules)
    seconds: float = 1.0
    slowest_s: float = 0.0
    """Longest decision."""
    statuses: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def __call__(self, cluster: Cluster) -> Act:
        question = Question(
            now_s=cluster.now_s,
            waiting=tuple(cluster.waiting.values()),
            running=cluster.running(),
            nodes=cluster.nodes,
            rules=self.rules,
        )
        decisions = decide(question, seconds=self.seconds)
        self.slowest_s = max(self.slowest_s, decisions.solver.seconds)
        self.statuses[decisions.solver.status] += 1
        stops = tuple(preempt.job for preempt in decisions.preempts)
        again_s = cluster.now_s if stops else cluster.now_s + AGAIN_S
        return Act(
            stops=stops,
            starts=tuple((start.job, start.node, start.gpu) for start in decisions.starts),
            again_s=again_s,
        )
