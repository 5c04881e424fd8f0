"""Many jobs over unlike GPUs: our placement against FIFO, shortest-first and a Gavel-like policy on generated traces.

    python tests/benchmarks/placement.py [--quick] [--json]

The cluster is a lab's: 2 servers of 8 H800, 4 boxes of 4 RTX 3090. Jobs are full fine-tunes of six model sizes; what
each needs and reaches on each kind of node is what the planner predicts, and every policy sees the same predictions
(see `queue_policies` for the policies, `queue_simulation` for what holds for all of them). ``jct_over_fifo`` is our
mean time from submission to completion over that of the better of two FIFOs, ``jct_over_gavel`` over Gavel's, each on
the trace where it is worst for us, at 85 % load; ``overload`` is the same at 110 %. ``starved`` counts jobs that waited
longer than ``reserve_after_s`` and the longest run of the trace together. ``decide_s`` is one decision over 1,000
waiting jobs and 64 GPUs. ``--quick``: shorter traces, options by the fixed rule instead of the planner.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from facts import facts
from queue_policies import Gavel, Ours, fifo, fifo_passing, shortest_first
from queue_simulation import Arrival, Outcome, Policy, simulate

from lazytrain.schedulers.hardware import HardwareProfile, hardware
from lazytrain.schedulers.options import Planned, options
from lazytrain.schedulers.placement import Gpu, NodeState, Option, Question, Rules, WaitingJob, decide
from lazytrain.schedulers.planner import plan

LOADS = (0.85, 1.1)
"""Work that arrives over what the GPUs can do: a busy lab, which counts, and one whose queue grows to the end."""
GIB = 1 << 30
HOUR = 3600.0
STARTUP_S = 180.0
"""Processes, Ray, loading a model from the lab's storage."""
JOBS = 500
SURPRISE = 0.1
"""Standard deviation of the logarithm of true over predicted speed."""
BATCHES = {
    "qwen2.5-3b": {"H800": 96, "RTX3090": 7},
    "qwen2.5-7b": {"H800": 64, "RTX3090": 5},
    "llama-3.1-8b": {"H800": 64, "RTX3090": 5},
    "qwen2.5-14b": {"H800": 48, "RTX3090": 3},
    "qwen3.6-27b": {"H800": 32, "RTX3090": 1},
    "llama-3.1-70b": {"H800": 8},
}
"""Rows of 1,024 tokens, by model and kind of GPU; the 70B model is larger than a box's host memory."""
SIZES = {
    "philly": {"qwen2.5-3b": 3, "qwen2.5-7b": 4, "llama-3.1-8b": 3, "qwen2.5-14b": 1},
    "bursts": {"qwen2.5-3b": 2, "qwen2.5-7b": 3, "llama-3.1-8b": 3, "qwen2.5-14b": 2, "qwen3.6-27b": 1},
    "mixed": {
        "qwen2.5-3b": 2, "qwen2.5-7b": 2, "llama-3.1-8b": 2, "qwen2.5-14b": 2, "qwen3.6-27b": 2, "llama-3.1-70b": 1,
    },
}  # fmt: skip
"""How often each model occurs, by trace."""


def cluster() -> tuple[NodeState, ...]:
    """The lab's nodes."""
    boxes = [
        NodeState(
            name=f"box-{i}",
            kind="RTX3090",
            gpus=tuple(Gpu(id=f"{g}", pcie_root=f"{g // 2}") for g in range(4)),
            host_bytes=384 * GIB,
            dram_bytes_s=hardware("RTX3090").host_bytes_s,
            pcie_bytes_s=hardware("RTX3090").h2d_bytes_s,
        )
        for i in range(4)
    ]
    servers = [
        NodeState(
            name=f"server-{i}",
            kind="H800",
            gpus=tuple(Gpu(id=f"{g}", pcie_root=f"{g // 2}") for g in range(8)),
            host_bytes=2048 * GIB,
            dram_bytes_s=hardware("H800").host_bytes_s,
            pcie_bytes_s=hardware("H800").h2d_bytes_s,
        )
        for i in range(2)
    ]
    return (*boxes, *servers)


_OPTIONS: dict[str, tuple[Option, ...]] = {}


def options_of(model: str, *, quick: bool) -> tuple[Option, ...]:
    """What the planner predicts for a model, one option per kind of node that can hold it; no tokens to train yet."""
    if model not in _OPTIONS:
        _OPTIONS[model] = _planned_options(model, quick=quick)
    return _OPTIONS[model]


def _planned_options(model: str, *, quick: bool) -> tuple[Option, ...]:
    machines = {"H800": hardware("H800"), "RTX3090": hardware("RTX3090", host_memory=384 * GIB)}

    def plan_on(profile: HardwareProfile) -> Planned:
        known = facts(model, BATCHES[model].get(profile.kind, 1))
        return known, plan(known, profile, planner="every_layer" if quick else "full", solve_seconds=3)

    found = options(1.0, machines, plan_on, startup_s=STARTUP_S, gpus={"H800": 8, "RTX3090": 4})
    print(f"{model}: {[(o.kind, round(o.tokens_per_s), o.host_bytes >> 30) for o in found.options]}", file=sys.stderr)
    return found.options


def capacity(model_mix: Mapping[str, int], *, quick: bool) -> float:
    """The cluster in H800s: a 3090 counts as the mean part of an H800's speed that it reaches on these models."""
    parts = []
    for model, times in model_mix.items():
        rates = {option.kind: option.tokens_per_s for option in options_of(model, quick=quick)}
        parts += [rates.get("RTX3090", 0.0) / rates["H800"]] * times
    return 16 + 16 * statistics.mean(parts)


def trace(name: str, *, jobs: int, load: float, seed: int, quick: bool) -> list[Arrival]:
    """Jobs with log-normal run times (on an H800; median 1.5 h, a tail of days), at ``load`` of the cluster.

    ``philly`` comes with the rhythm of the day, ``bursts`` twenty jobs at a time, ``mixed`` evenly but with models of
    up to 70B.
    """
    draw = random.Random(f"{name} {seed}")
    mix = SIZES[name]
    runs_s = [min(max(draw.lognormvariate(math.log(1.5 * HOUR), 1.4), 300.0), 96 * HOUR) for _ in range(jobs)]
    gap_s = statistics.mean(runs_s) / (load * capacity(mix, quick=quick))
    found, now_s = [], 0.0
    for number, run_s in enumerate(runs_s):
        now_s += _gap(name, number, now_s, gap_s, draw)
        model = draw.choices(list(mix), list(mix.values()))[0]
        offers = options_of(model, quick=quick)
        tokens = run_s * next(option.tokens_per_s for option in offers if option.kind == "H800")
        job = WaitingJob(
            id=f"{name}-{number:03d}",
            user=f"user-{min(7, int(draw.expovariate(0.5)))}",
            priority=50,
            submitted_s=now_s,
            options=tuple(replace(option, work_tokens=tokens) for option in offers),
        )
        found.append(Arrival(job, math.exp(draw.gauss(0.0, SURPRISE))))
    return found


def _gap(name: str, number: int, now_s: float, mean_s: float, draw: random.Random) -> float:
    if name == "bursts":
        return draw.expovariate(1 / (20 * mean_s)) if number % 20 == 0 else draw.uniform(0, 60.0)
    day = 1 + 0.8 * math.sin(2 * math.pi * now_s / (24 * HOUR)) if name == "philly" else 1.0
    return draw.expovariate(day / mean_s)


POLICIES: dict[str, Callable[[], Policy]] = {
    "fifo": lambda: fifo,
    "fifo_passing": lambda: fifo_passing,
    "shortest_first": lambda: shortest_first,
    "gavel": Gavel,
}


def compare(name: str, *, jobs: int, load: float, quick: bool, rules: Rules) -> dict[str, Any]:
    """All policies on one trace."""
    arrivals = trace(name, jobs=jobs, load=load, seed=1, quick=quick)
    ours = Ours(rules)
    done = {policy: simulate(arrivals, cluster(), make()) for policy, make in POLICIES.items()}
    done["ours"] = simulate(arrivals, cluster(), ours)
    longest_s = max(max(option.seconds for option in arrival.job.options) for arrival in arrivals)
    bound_s = rules.reserve_after_s + longest_s
    result = {
        "trace": name,
        "jobs": jobs,
        "load": load,
        "policies": {policy: _summary(outcome, bound_s) for policy, outcome in done.items()},
        "starved_after_h": bound_s / HOUR,
        "slowest_decision_s": ours.slowest_s,
        "solver": dict(ours.statuses),
    }
    print(json.dumps(result), file=sys.stderr)
    return result


def _summary(outcome: Outcome, bound_s: float) -> dict[str, float]:
    times, waits = list(outcome.completion_s.values()), list(outcome.wait_s.values())
    return {
        "mean_completion_h": statistics.mean(times) / HOUR,
        "median_completion_h": statistics.median(times) / HOUR,
        "p95_completion_h": statistics.quantiles(times, n=20)[-1] / HOUR,
        "longest_wait_h": max(waits) / HOUR,
        "starved": sum(wait > bound_s for wait in waits),
        "busy_share": outcome.busy_share,
    }


def one_decision(*, quick: bool) -> dict[str, Any]:
    """A thousand jobs at once on 64 idle GPUs, the most that a decision can have to do."""
    kinds = cluster()
    nodes = [replace(kinds[0], name=f"box-{i}") for i in range(8)]
    nodes += [replace(kinds[-1], name=f"server-{i}") for i in range(4)]
    arrivals = trace("mixed", jobs=1000, load=0.8, seed=2, quick=quick)
    waiting = tuple(arrival.job for arrival in arrivals)
    now_s = max(job.submitted_s for job in waiting)
    decisions = decide(Question(now_s=now_s, waiting=waiting, running=(), nodes=tuple(nodes)), seconds=1.0)
    return {"seconds": decisions.solver.seconds, "status": decisions.solver.status, "starts": len(decisions.starts)}


def run(*, quick: bool) -> dict[str, Any]:
    """Every trace, and the decision by itself."""
    jobs = 120 if quick else JOBS
    rules = Rules(moving=True)
    began = time.perf_counter()
    loads = LOADS[:1] if quick else LOADS
    with _processes() as pool:
        _OPTIONS.update(zip(BATCHES, pool.map(partial(_planned_options, quick=quick), BATCHES), strict=True))
    with _processes() as pool:  # forked now, so that every process knows the options
        asked = [
            pool.submit(compare, name, jobs=jobs, load=load, quick=quick, rules=rules)
            for load in loads
            for name in SIZES
        ]
        traces = [answer.result() for answer in asked]
    decision = one_decision(quick=quick)
    return {
        "jobs": jobs,
        "gpus": sum(len(node.gpus) for node in cluster()),
        "decide_s": decision["seconds"],
        "decision": decision,
        "jct_over_fifo": max(_ratios(traces, LOADS[0], "fifo", "fifo_passing")),
        "jct_over_shortest_first": max(_ratios(traces, LOADS[0], "shortest_first")),
        "jct_over_gavel": max(_ratios(traces, LOADS[0], "gavel")),
        "overload": [
            {
                "load": load,
                "jct_over_fifo": max(_ratios(traces, load, "fifo", "fifo_passing")),
                "jct_over_gavel": max(_ratios(traces, load, "gavel")),
            }
            for load in loads[1:]
        ],
        "starved": sum(row["policies"]["ours"]["starved"] for row in traces),
        "traces": traces,
        "seconds": time.perf_counter() - began,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "ortools": version("ortools")},
    }


def _processes() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("fork"))


def _ratios(traces: Sequence[Mapping[str, Any]], load: float, *others: str) -> list[float]:
    """Our mean completion time over that of the best of the others, for each trace at this load."""
    rows = [row["policies"] for row in traces if row["load"] == load]
    means = [{name: summary["mean_completion_h"] for name, summary in row.items()} for row in rows]
    return [mean["ours"] / min(mean[other] for other in others) for mean in means]


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The traces as a table."""
    for row in rows:
        print(f"{row['trace']}: {row['jobs']} jobs at {100 * row['load']:.0f} % load")
        for policy, summary in row["policies"].items():
            print(
                f"  {policy:>15}: mean {summary['mean_completion_h']:6.2f} h, "
                f"p95 {summary['p95_completion_h']:6.2f} h, "
                f"longest wait {summary['longest_wait_h']:6.1f} h, starved {summary['starved']}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter traces, options by the fixed rule")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    result = run(quick=given.quick)
    if given.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    show(result["traces"])
    for name in ("jct_over_fifo", "jct_over_shortest_first", "jct_over_gavel", "starved", "decide_s"):
        print(f"{name}: {result[name]}")


if __name__ == "__main__":
    main()
