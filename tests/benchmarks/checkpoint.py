"""What saving costs, and whether a run survives being killed again and again.

    python tests/benchmarks/checkpoint.py [--quick] [--json] [--cycles N]

The demo's model trains on its sums. **Cost**: runs that save every ``SAVE_EVERY`` steps; ``save_share_of_step_time`` is
the time for which training waited for saves (one to end before the next, updates for their units), over the time of all
steps; ``state_mib`` is what a save writes. **Soak**: one run is killed with signal 9 at a point drawn by chance, among
all that `train` and `CheckpointStore` name, and goes on, ``--cycles`` times; ``bit_exact`` says whether its weights and
optimizer states then equal those of a run that nothing disturbed. **Loading**: ``load_mib_s`` of a checkpoint, hashes
checked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from lazytrain.jobs.checkpoint import CheckpointStore
from lazytrain.jobs.executor import Emulated
from lazytrain.jobs.spec import JobSpec, load_spec
from lazytrain.jobs.tracking import read_metrics
from lazytrain.jobs.train import train
from lazytrain.platform.demo.inputs import write_inputs

CYCLES, QUICK_CYCLES = 200, 8
SAVE_EVERY = 50
POINTS = [
    "claimed", "loaded", "prepared", "rehearsed", "resumed", "forward", "backward", "step", "stepped", "evaluating",
    "saving", "start", "unit", "trainer", "manifest", "synced", "renamed", "published", "removing", "removed", "done",
]  # fmt: skip
ONCE = {"claimed", "loaded", "prepared", "rehearsed", "resumed", "evaluating"}
"""Points that come by once in a process, or seldom."""
GPU = Emulated(memory_bytes=1 << 30, h2d_bytes_s=4e9, d2h_bytes_s=4e9)


def spec_of(job: Path, folder: Path, steps: int, *, save_every: int) -> JobSpec:
    """Short steps of four rows, no generation, an evaluation of the loss now and then."""
    return load_spec(
        job,
        [
            f"output.dir={folder}", f"output.save_every={save_every}", "output.keep=2", f"train.max_steps={steps}",
            "train.epochs=1000", "train.batch=4", "evaluate.limit=1", "evaluate.max_new_tokens=1",
            "evaluate.every=0.004",
        ],
    )  # fmt: skip


def cost(job: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Time that saves took from training, on an emulated GPU whose updates run beside the next forward."""
    result = train(spec_of(job, folder / "cost", steps, save_every=SAVE_EVERY), device=GPU)
    rows = [row for row in read_metrics(folder / "cost" / "metrics.jsonl") if "loss" in row]
    checkpoint = CheckpointStore(folder / "cost" / "checkpoints").latest()
    assert checkpoint is not None
    started = time.perf_counter()
    for unit in checkpoint.units:
        checkpoint.unit(unit)
    load_s = time.perf_counter() - started
    return {
        "save_share_of_step_time": rows[-1]["stall_save_s"] / sum(row["step_s"] for row in rows),
        "step_s": result.step_s,
        "save_every": SAVE_EVERY,
        "state_mib": checkpoint.bytes / 2**20,
        "load_mib_s": checkpoint.bytes / 2**20 / load_s,
    }


def attempt(spec: JobSpec, point: str, times: int) -> bool:
    """Train in a child process that dies when ``point`` comes by for the ``times``-th time; whether it did."""
    child = os.fork()
    if child == 0:
        seen = [0]

        def on_point(name: str) -> None:
            seen[0] += name.startswith(point) if point else 0
            if point and seen[0] == times:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            train(spec, device="cpu", on_point=on_point)
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) == signal.SIGKILL
    if os.WEXITSTATUS(status):
        raise RuntimeError(f"the process that should have died at {point!r} failed")
    return False


def soak(job: Path, folder: Path, cycles: int) -> dict[str, Any]:
    """Kill and go on, then compare with a run that was left alone."""
    drawn = random.Random(0)
    steps = 6 * cycles + 20
    spec = spec_of(job, folder / "soak", steps, save_every=1)
    killed: dict[str, int] = {}
    at = time.perf_counter()
    seconds = []
    while sum(killed.values()) < cycles:
        point = drawn.choice(POINTS) if killed else "stepped"
        if not attempt(spec, point, 1 if point in ONCE else drawn.randint(1, 3)):
            break  # the run came to its end first
        killed[point] = killed.get(point, 0) + 1
        seconds.append(time.perf_counter() - at)
        at = time.perf_counter()
        if len(seconds) % 20 == 0:
            print(f"{len(seconds)} kills", file=sys.stderr, flush=True)
    attempt(spec, "", 0)
    attempt(spec_of(job, folder / "whole", steps, save_every=10**6), "", 0)
    return {
        "kill_resume_cycles": sum(killed.values()),
        "bit_exact": _states(folder / "soak") == _states(folder / "whole"),
        "steps": steps,
        "points": dict(sorted(killed.items())),
        "median_cycle_s": statistics.median(seconds),
    }


def _states(run: Path) -> dict[str, bytes]:
    """Every tensor of the last checkpoint, as bytes; and the losses that were reported."""
    checkpoint = CheckpointStore(run / "checkpoints").latest()
    assert checkpoint is not None
    found = {
        f"{unit}/{name}": bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for unit in checkpoint.units
        for name, tensor in checkpoint.unit(unit).items()
        if tensor.numel()
    }
    losses = [(row["step"], row["loss"]) for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    return {**found, "losses": repr(losses).encode()}


def run(*, cycles: int, cost_steps: int) -> dict[str, Any]:
    """Soak first: forks are made before any thread is started."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = write_inputs(folder / "demo", 0)
        survived = soak(job, folder, cycles)
        return {
            **cost(job, folder, cost_steps),
            **survived,
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "versions": {"python": platform.python_version(), **{p: version(p) for p in ("torch", "safetensors")}},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CYCLES} cycles")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--cycles", type=int, help=f"times that the run is killed ({CYCLES})")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    cycles = chosen.cycles or (QUICK_CYCLES if chosen.quick else CYCLES)
    result = run(cycles=cycles, cost_steps=2 * SAVE_EVERY + 1 if chosen.quick else 6 * SAVE_EVERY + 1)
    if chosen.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    print(
        f"saves take {result['save_share_of_step_time']:.2%} of the steps' time; "
        f"{result['kill_resume_cycles']} kills, {'the same bits' if result['bit_exact'] else 'OTHER BITS'}"
    )


if __name__ == "__main__":
    main()
