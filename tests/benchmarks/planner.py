"""How fast the paper's planning problem is solved to a proven optimum, and how that compares with what was published.

    python tests/benchmarks/planner.py [--quick] [--json]

Six budgets of the 27B run (host/NVMe GiB for activations). ``seconds`` is the median wall-clock time of building the
model and solving it. ``published_objective`` prices the published schedule in the same model, for the budgets that it
respects. Two readings of a window's capacity are solved: four forwards (a layer's forward, re-forward and backward),
and, without ``--quick``, half a forward, where the links and not the budgets decide and the solver works hardest.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lazytrain.jobs.errors import ProgramError
from lazytrain.schedulers.planner import Instance, Solution, price, solve

TESTS = Path(__file__).resolve().parents[1]
Published = runpy.run_path(str(TESTS / "schedulers" / "planner" / "conftest.py"))["Published"]  # the tests' constants


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


def run(*, quick: bool) -> dict[str, Any]:
    """All rows and their summary."""
    published = Published()
    solve(published.instance("4/4"))  # loads the solver
    windows = (4.0,) if quick else (4.0, 0.5)
    rows = [paper_case(published, budget, w, quick=quick) for w in windows for budget in published.names]
    seconds = [row["seconds"] for row in rows]
    return {
        "paper_cases": rows,
        "median_solve_s": statistics.median(seconds),
        "worst_solve_s": max(seconds),
        "worst_gap": max(row["gap"] for row in rows),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "ortools": version("ortools")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one reading of the windows, one solve each")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = run(quick=options.quick)
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


if __name__ == "__main__":
    main()
