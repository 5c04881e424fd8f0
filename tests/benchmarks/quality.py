"""Whether 8-bit states cost quality: the same training runs with fp32 and with 8-bit optimizers, over several seeds.

    python tests/benchmarks/quality.py [--quick] [--json] [--picture FILE] [--gsm8k TRAIN.JSONL] [--task NAME]

Two tasks, each learnt from scratch: ``demo``, two-digit sums by the demo's model (a Qwen3 of a million parameters),
and, given the rows of GSM8K's training set, ``gsm8k``, its answers by a Qwen3 of half a million. A seed decides the
first weights and the order of the rows, the same for every optimizer. ``final`` is the loss on held-out rows, which
training never shows (of the demo: number pairs that it never shows), after the last step. ``spread_fp32`` is the
largest minus the smallest of the fp32 runs: 8 bits cost nothing that can be told from chance while their mean stays
within it. All weights are fp32, so that nothing but the states differs. ``--picture`` draws the curves.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gsm8k_model import Gsm8kModel
from small_model import SmallModel

from lazytrain.jobs.optim import HybridAdamW

RATE, DECAY, CLIP = 2e-3, 0.01, 1.0
Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def fp32(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)


def eight_bit(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return HybridAdamW(parameters, lr=RATE, weight_decay=DECAY)


def bitsandbytes(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    import bitsandbytes as library

    return library.optim.AdamW8bit(parameters, lr=RATE, weight_decay=DECAY)


OPTIMIZERS: dict[str, Make] = {"fp32": fp32, "eightbit": eight_bit, "bitsandbytes": bitsandbytes}


def train(small: SmallModel | Gsm8kModel, name: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: loss of every tenth step (mean of the ten) and the held-out loss at its end."""
    optimizer = OPTIMIZERS[name](small.model.parameters())
    losses: list[float] = []
    for step, (ids, labels) in zip(range(steps), small.batches(), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate(step, steps)
        optimizer.zero_grad()
        loss = small.loss(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(small.model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    curve = [round(statistics.mean(losses[i : i + 10]), 5) for i in range(0, steps, 10)]
    return {"optimizer": name, "seed": seed, "final": small.held_out_loss(), "curve": curve}


def rate(step: int, steps: int) -> float:
    """Warm-up over a twentieth, then half a cosine."""
    warm = steps // 20
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def run(make: Callable[[int], SmallModel | Gsm8kModel], *, quick: bool) -> dict[str, Any]:
    """All runs of a task and their summary."""
    seeds, steps = (range(1), 60) if quick else (range(3), 1000)
    runs = []
    for seed in seeds:
        for name in OPTIMIZERS:
            runs.append(train(make(seed), name, seed, steps))
            print(f"seed {seed} {name}: {runs[-1]['final']:.4f}", file=sys.stderr, flush=True)
    finals = {name: [r["final"] for r in runs if r["optimizer"] == name] for name in OPTIMIZERS}
    return {
        "seeds": len(seeds),
        "steps": steps,
        **{f"{name}_final": statistics.mean(values) for name, values in finals.items()},
        "spread_fp32": max(finals["fp32"]) - min(finals["fp32"]),
        "runs": runs,
    }


def run_tasks(tasks: Iterable[str], rows: Path | None, *, quick: bool) -> dict[str, Any]:
    """The demo's result, beside it those of the other tasks by name."""
    found: dict[str, Any] = {"versions": {"python": platform.python_version()}}
    found["versions"] |= {package: version(package) for package in ("torch", "bitsandbytes")}
    for task in tasks:
        if task == "demo":
            found = run(SmallModel, quick=quick) | found
        else:
            assert rows is not None
            found[task] = run(lambda seed: Gsm8kModel(seed, rows), quick=quick)
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    """The training losses of every run, a panel per task and a colour per optimizer."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = {"demo": result, "gsm8k": result.get("gsm8k", {})}
    tasks = {name: task["runs"] for name, task in found.items() if "runs" in task}
    figure, panels = pyplot.subplots(1, len(tasks), figsize=(7 * len(tasks), 4.5), layout="constrained", squeeze=False)
    colours = dict(zip(OPTIMIZERS, ("black", "tab:blue", "tab:orange"), strict=True))
    for axes, (task, runs) in zip(panels[0], tasks.items(), strict=True):
        for one in runs:
            label = one["optimizer"] if one["seed"] == 0 else None
            steps = range(10, 10 * len(one["curve"]) + 1, 10)
            axes.plot(steps, one["curve"], color=colours[one["optimizer"]], label=label, linewidth=1, alpha=0.8)
        axes.set(title=task, xlabel="step", ylabel="training loss (mean of ten steps)", yscale="log")
        axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 60 steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--picture", type=Path, help="file for the curves")
    parser.add_argument("--gsm8k", type=Path, help="train.jsonl of GSM8K; without it only the demo's task is run")
    parser.add_argument("--task", choices=("demo", "gsm8k"), help="only this one")
    options = parser.parse_args()
    if options.task == "gsm8k" and options.gsm8k is None:
        parser.error("--task gsm8k needs --gsm8k")
    torch.set_num_threads(1)
    tasks = [options.task] if options.task else ["demo", *(["gsm8k"] if options.gsm8k else [])]
    result = run_tasks(tasks, options.gsm8k, quick=options.quick)
    if options.picture:
        draw(result, options.picture)
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    for task in tasks:
        found = result if task == "demo" else result[task]
        print(f"{task}, {found['seeds']} seeds, {found['steps']} steps: spread of fp32 {found['spread_fp32']:.4f}")
        for name in OPTIMIZERS:
            print(f"  {name:<14} {found[f'{name}_final']:.4f}")


if __name__ == "__main__":
    main()
