"""Both planners: the paper's, solved to a proven optimum, and the full one over a grid, against every fixed rule.

    python tests/benchmarks/planner.py [--quick] [--json] [--resume FILE [--part 1/2] [--kept]]

Six budgets of the 27B run (host/NVMe GiB for activations). ``seconds`` is the median wall-clock time of building the
model and solving it. ``published_objective`` prices the published schedule in the same model, for the budgets that it
respects. Two readings of a window's capacity are solved: four forwards (a layer's forward, re-forward and backward),
and, without ``--quick``, half a forward, where the links and not the budgets decide and the solver works hardest.

The grid: seven models, five machines, two batches, three sizes of host memory and NVMe. A case counts as worse than a
rule if the full plan is simulated slower than ``megatrain``, ``every_layer``, ``keep_all`` or the paper's plan by more
than a millionth. ``seconds`` is the wall-clock time of the whole search and ``solve_cpu_s`` what of it the process
computed; ``cpu_s`` is its time in all of `plan`, the rules and their prediction included, and ``load`` the machine's
load average then. ``--part 1/2`` measures every other case only, for two processes with a file each; ``--kept``
measures none and reports what the file (of both, one after the other) holds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import statistics
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from facts import facts
from resume import Kept

from lazytrain.jobs.errors import ProgramError
from lazytrain.schedulers.costs import state_bytes
from lazytrain.schedulers.hardware import hardware
from lazytrain.schedulers.planner import Instance, Plan, Solution, plan, price, solve

TESTS = Path(__file__).resolve().parents[1]
Published = runpy.run_path(str(TESTS / "schedulers" / "planner" / "conftest.py"))["Published"]  # the tests' constants

MODELS = (
    "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen3.6-27b", "llama-3.1-8b", "llama-3.1-70b", "gpt-oss-120b",
)  # fmt: skip
MACHINES: dict[str, tuple[str, float, tuple[int, int]]] = {
    "RTX3090": ("RTX3090", 25, (2, 8)),
    "RTX4090": ("RTX4090", 25, (2, 8)),
    "H800 12 GB/s": ("H800", 12, (16, 64)),
    "H800 50 GB/s": ("H800", 50, (16, 64)),
    "H200": ("H200", 50, (24, 96)),
}
"""GPU, link rate in 1e9 bytes per second, batches."""
TIERS = (("64GiB", 0), ("320GiB", "1TB"), ("2TiB", 0))
"""Host memory and NVMe."""
QUICK_CASES = 8
SOLVE_SECONDS = 300.0
"""So long that the work which the planner may do decides, also on a machine that others use."""


def measure(instance: Instance, backend: str, repeats: int) -> tuple[Solution, float]:
    """The solution and the median seconds of building the model and solving it."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        solution = solve(instance, backend=backend, seconds=60)
        seconds.append(time.perf_counter() - start)
    return solution, statistics.median(seconds)


def published_objective(published: Any, instance: Instance) -> float | None:
    """Price of the published schedule, or None where it passes the budgets."""
    try:
        return price(instance, published.schedule).objective_s
    except ProgramError:
        return None


def paper_case(published: Any, budget: str, window_forwards: float, *, quick: bool) -> dict[str, Any]:
    """One row: status, time and objective, and unless quick the second solver's objective and time."""
    instance = published.instance(budget, window_forwards)
    solution, seconds = measure(instance, "highs", 1 if quick else 5)
    row = {
        "budget": budget,
        "window_forwards": window_forwards,
        "status": solution.status,
        "seconds": round(seconds, 4),
        "objective": solution.objective_s,
        "gap": solution.gap,
        "published_objective": published_objective(published, instance),
        "homes": {tier: solution.homes.count(tier) for tier in ("gpu", "host", "nvme", "recompute")},
    }
    if not quick:
        second, second_s = measure(instance, "gscip", 1)
        row |= {"gscip_objective": second.objective_s, "gscip_seconds": round(second_s, 4)}
    return row


def grid() -> list[dict[str, Any]]:
    """All cases of the grid."""
    return [
        {"model": model, "machine": machine, "batch": batch, "host": host, "nvme": nvme}
        for model in MODELS
        for machine, (_, _, batches) in MACHINES.items()
        for batch in batches
        for host, nvme in TIERS
    ]


def full_case(case: dict[str, Any]) -> dict[str, Any]:
    """One case of the grid with the full plan and what the rules take."""
    gpu, link, _ = MACHINES[case["machine"]]
    profile = hardware(gpu, h2d_gbps=link, d2h_gbps=link, host_memory=case["host"], nvme=case["nvme"])
    known = facts(case["model"], case["batch"])
    state = sum(state_bytes(known).values())
    if state > profile.host_memory_bytes and not case["nvme"]:
        return {**case, "feasible": False, "short": {"host_memory": state - profile.host_memory_bytes}}
    begun, cpu = time.perf_counter(), time.process_time()
    answer = plan(known, profile, solve_seconds=SOLVE_SECONDS)
    spent = {"wall_s": round(time.perf_counter() - begun, 3), "cpu_s": round(time.process_time() - cpu, 3)}
    return {**case, **spent, "load": round(os.getloadavg()[0], 1), **full_answer(answer)}


def full_answer(answer: Plan) -> dict[str, Any]:
    """What is recorded of a plan."""
    if answer.policy is None or answer.predicted is None or answer.solver is None:
        return {"feasible": False, "short": {r.resource: r.shortfall_bytes for r in answer.reasons}}
    layers = answer.policy.layers
    return {
        "feasible": True,
        "status": answer.solver.status,
        "seconds": round(answer.solver.seconds, 3),
        "solve_cpu_s": round(answer.solver.cpu_seconds, 3),
        "gap": answer.solver.gap,
        "out_of_time": answer.solver.out_of_time,
        "step_s": answer.predicted.step_s,
        "rules": {name: predicted.step_s for name, predicted in answer.baselines.items()},
        "homes": answer.policy.count_homes(),
        "kept": {
            f"{kind} {home}": sum((x.internals, x.internals_home) == (kind, home) for x in layers)
            for kind in ("matmuls", "all")
            for home in ("gpu", "host")
        },
        "resident": sum(layer.resident for layer in layers),
        "slots": [answer.policy.weight_slots, answer.policy.staging_slots],
    }


def full_summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and extremes over the grid, negative results by name."""
    done = [case for case in cases if case["feasible"]]
    worse = [case for case in done if case["step_s"] > min(case["rules"].values(), default=1e99) * (1 + 1e-6)]
    loose = [case for case in done if case["gap"] is None or case["gap"] > 0.01]
    gaps = [case["gap"] if case["gap"] is not None else 1.0 for case in done]
    speedups = [min(case["rules"].values()) / case["step_s"] for case in done if case["rules"]]
    names = ("model", "machine", "batch", "host", "nvme", "gap", "seconds")
    return {
        "cases": len(cases),
        "solve_seconds": SOLVE_SECONDS,
        "planned": len(done),
        "worse_than_a_rule": len(worse),
        "worse": [{name: case[name] for name in names} for case in worse],
        "median_solve_s": statistics.median(case["seconds"] for case in done),
        "worst_solve_s": max(case["seconds"] for case in done),
        "median_solve_cpu_s": statistics.median(case["solve_cpu_s"] for case in done),
        "worst_solve_cpu_s": max(case["solve_cpu_s"] for case in done),
        "median_cpu_s": statistics.median(case["cpu_s"] for case in done),
        "worst_cpu_s": max(case["cpu_s"] for case in done),
        "median_load": statistics.median(case["load"] for case in done),
        "out_of_time": sum(case["out_of_time"] for case in done),
        "worst_gap": max(gaps),
        "median_gap": statistics.median(gaps),
        "proven_to_1_percent": len(done) - len(loose),
        "gap_above_1_percent": [{name: case[name] for name in names} for case in loose],
        "median_speedup_over_best_rule": statistics.median(speedups) if speedups else None,
    }


def run(*, quick: bool, kept: Kept, part: tuple[int, int], measured: bool) -> dict[str, Any]:
    """All rows of a part of the grid, or those that are kept, and their summary."""
    published = Published()
    solve(published.instance("4/4"))  # loads the solver
    windows = (4.0,) if quick else (4.0, 0.5)
    rows = [
        kept.result(["paper", budget, w, quick], partial(paper_case, published, budget, w, quick=quick))
        for w in windows
        for budget in published.names
    ]
    chosen = [case for case in grid() if case["model"] in ("qwen2.5-7b", "llama-3.1-8b") and case["host"] == "2TiB"]
    cases = []
    begun = time.perf_counter()
    for case in chosen[:QUICK_CASES] if quick else grid()[part[0] - 1 :: part[1]]:
        if not (measured or kept.has(case)):
            continue
        if quick and time.perf_counter() - begun > 25:
            break
        cases.append(kept.result(case, partial(full_case, case)))
        print(f"{len(cases)}: {cases[-1]}", file=sys.stderr)
    return {
        **full_summary(cases),
        "paper_cases": rows,
        "paper_worst_s": max(row["seconds"] for row in rows),
        "grid": cases,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "ortools": version("ortools")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one reading of the windows, one solve each, few cases")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--resume", type=Path, help="keep each case in this file, and take from it what is there")
    parser.add_argument("--part", default="1/1", help="1/2 is the first, 2/2 the second half of the cases")
    parser.add_argument("--kept", action="store_true", help="report the cases of the file, measure none")
    options = parser.parse_args()
    number, parts = (int(text) for text in options.part.split("/"))
    kept = Kept(options.resume)
    result = run(quick=options.quick, kept=kept, part=(number, parts), measured=not options.kept)
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    for row in result["paper_cases"]:
        theirs = row["published_objective"]
        beside = f"published schedule {theirs:.6f} s" if theirs is not None else "published schedule does not fit"
        print(
            f"{row['budget']:>6} window {row['window_forwards']}: {row['status']} in {row['seconds']:.3f} s, "
            f"objective {row['objective']:.6f} s, {beside}"
        )
    for name in (
        "cases",
        "planned",
        "worse_than_a_rule",
        "median_solve_s",
        "worst_solve_s",
        "median_solve_cpu_s",
        "worst_solve_cpu_s",
        "worst_gap",
    ):
        print(f"{name}: {result[name]}")


if __name__ == "__main__":
    main()
