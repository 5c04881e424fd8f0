"""The 8-bit AdamW step against the CPU optimizers people use, and against what the memory can do.

    python tests/benchmarks/optimizer.py [--quick] [--json] [--threads N] [--attempts N]

All optimizers take turns in one process; a ratio is the median over the rounds of the quotient of neighbouring times,
so that what else runs on the machine hits both. Ours keeps bf16 weights with an exact fp32 master in two halves and
8-bit states, and is called as the executor calls it, clip factor included; torch's fused AdamW has fp32 weights and
states, DeepSpeed's CPUAdam bf16 weights and fp32 states (``pip install 'lazytrain[bench]'``, compiled on first use),
bitsandbytes' AdamW8bit the faster of bf16 and fp32 weights.

``bandwidth_share`` is 14.06 bytes a parameter (read: gradient 2, weights 4, states 2; written: weights 4, states 2;
scales 0.06) over our time, over the best of copying, triad and scaling in place on fp32 arrays in large pages: the
median of the rounds' shares, as the memory's rate changes within a run. ``memory_gb_s`` is the median of the rounds'
bests between their least and most. ``clipping_overhead`` is the whole ``step()`` with a limit over that without; the
norm is computed in both, as a gradient that is not finite must stop the step. ``norm_share`` is what its pass over the
gradient takes of an update.

Every part says which share of the processors other processes took meanwhile; without ``--quick`` a part is repeated
until that is under 5 %, at most N times (12), and the quietest is kept. The keys are those of the largest size.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in every training process of ours

import torch

from lazytrain.jobs.layout import Layout
from lazytrain.jobs.optim import HybridAdamW, native
from lazytrain.jobs.optim.pages import zeros

BYTES_MOVED = 14.0625
Step = Callable[[], Any]


def rounds(steps: dict[str, Step], count: int) -> dict[str, list[float]]:
    """Seconds of ``count`` calls of each, taking turns; the first call of each is not counted."""
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(count):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float:
    """Median quotient of the times of one round."""
    return statistics.median(a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True))


def quietest(measure: Callable[[], dict[str, Any]], attempts: int) -> dict[str, Any]:
    """The measurement during which other processes took the least, repeated until that is next to nothing."""
    best: dict[str, Any] = {}
    for attempt in range(attempts):
        if attempt:
            time.sleep(5)
        before = _processor_seconds()
        found = measure()
        others, idle = (b - a for a, b in zip(before, _processor_seconds(), strict=True))
        found["share_of_others"] = round(max(0.0, others) / max(others + idle, 1e-9), 3)
        if not best or found["share_of_others"] < best["share_of_others"]:
            best = found
        if best["share_of_others"] < 0.05:
            break
    return best


def _processor_seconds() -> tuple[float, float]:
    """Of all processes but this one, and of all processors whatever they did less what they did for others."""
    mine = sum(os.times()[:2])
    lines = Path("/proc/stat").read_text().splitlines() if Path("/proc/stat").exists() else ["cpu 0 0 0 0 0 0 0 0"]
    ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in lines[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle - mine, idle + mine


def ours(numel: int, **options: Any) -> Step:
    layout = Layout.of({"weight": (numel // 4096, 4096)})
    unit = HybridAdamW(weight_decay=0.01, **options).unit(layout, torch.randn(layout.numel), torch.bfloat16)
    gradient = torch.randn(layout.numel).bfloat16()
    steps = iter(range(1, 1 << 30))
    return lambda: unit.update(gradient, step=next(steps), scale=0.5, lr=1e-4)


def parameter(numel: int, dtype: torch.dtype) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.randn(numel // 4096, 4096).to(dtype))
    made.grad = torch.randn(numel // 4096, 4096).to(dtype)
    return made


def torch_fused(numel: int) -> Step:
    return torch.optim.AdamW([parameter(numel, torch.float32)], lr=1e-4, weight_decay=0.01, fused=True).step


def deepspeed(numel: int, *, quick: bool) -> tuple[Step | None, str]:
    """Its step, or None and why there is none."""
    if importlib.util.find_spec("deepspeed") is None:
        return None, "deepspeed is not installed: pip install 'lazytrain[bench]'"
    from torch.utils.cpp_extension import get_default_build_root

    if quick and not any(Path(get_default_build_root()).glob("**/cpu_adam.so")):
        return None, "deepspeed has not compiled its CPUAdam yet, which takes minutes: run once without --quick"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja lies there
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where its log goes as well from now on
            from deepspeed.ops.adam import DeepSpeedCPUAdam

        step = DeepSpeedCPUAdam([parameter(numel, torch.bfloat16)], lr=1e-4, weight_decay=0.01).step
        step()
    except Exception as error:  # a build may fail in any way
        return None, f"deepspeed's CPUAdam does not run: {type(error).__name__}: {error}"
    return step, ""


def bitsandbytes(numel: int, dtype: torch.dtype) -> Step:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit([parameter(numel, dtype)], lr=1e-4, weight_decay=0.01).step


def memory(numel: int) -> dict[str, Step]:
    """Passes over fp32 arrays that are larger than the caches."""
    a, b, c = (zeros(numel, torch.float32).fill_(1.0) for _ in range(3))
    return {
        "copy": lambda: a.copy_(b),
        "triad": lambda: torch.add(b, c, alpha=0.5, out=a),
        "scale": lambda: a.mul_(1.0),
    }


MEMORY_BYTES = {"copy": 8, "triad": 12, "scale": 8}
"""An element."""


def compare(numel: int, count: int, *, threads: int, quick: bool) -> dict[str, Any]:
    """One row: our update beside torch's, DeepSpeed's and the memory's speed."""
    steps: dict[str, Step] = {"ours": ours(numel, threads=threads), "torch": torch_fused(numel)}
    theirs, reason = deepspeed(numel, quick=quick)
    if theirs is not None:
        steps["deepspeed"] = theirs
    lane = 1 << 26  # 256 MB an array: a part of 64 MB was seen to stay in the caches
    seconds = rounds(steps | memory(lane), count)
    best = [max(MEMORY_BYTES[name] * lane / seconds[name][i] for name in MEMORY_BYTES) for i in range(count)]
    return {
        "parameters": numel,
        "rounds": count,
        "ns_per_parameter": {name: round(1e9 * statistics.median(seconds[name]) / numel, 4) for name in steps},
        "fastest_ns_per_parameter": {name: round(1e9 * min(seconds[name]) / numel, 4) for name in steps},
        "time_over_torch_fused": ratio(seconds, "ours", "torch"),
        "time_over_deepspeed": ratio(seconds, "ours", "deepspeed") if theirs is not None else None,
        "deepspeed_reason": reason,
        "memory_gb_s": [round(rate / 1e9, 1) for rate in (min(best), statistics.median(best), max(best))],
        "bandwidth_share": statistics.median(
            BYTES_MOVED * numel / took / rate for took, rate in zip(seconds["ours"], best, strict=True)
        ),
    }


def over_bitsandbytes(numel: int, *, threads: int) -> dict[str, float]:
    """How many times faster ours is than bitsandbytes with its faster kind of weights."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    steps = {name: bitsandbytes(numel, kind) for name, kind in kinds.items()}
    seconds = rounds({"ours": ours(numel, threads=threads), **steps}, 3)
    return {
        "speedup_over_bitsandbytes": min(ratio(seconds, name, "ours") for name in kinds),
        **{f"bitsandbytes_{name}_ns": 1e9 * statistics.median(seconds[name]) / numel for name in kinds},
    }


def clipping(numel: int, count: int, *, threads: int) -> dict[str, float]:
    """The step of the drop-in optimizer with clipping over that without; the norm's pass over the update."""
    steps: dict[str, Step] = {}
    for name, limit in (("clipped", 1.0), ("unclipped", None)):
        optimizer = HybridAdamW([parameter(numel, torch.bfloat16)], lr=1e-4, max_grad_norm=limit, threads=threads)
        steps[name] = optimizer.step
    gradient = torch.randn(numel).bfloat16()
    counter = HybridAdamW(threads=threads)
    steps |= {"norm": lambda: counter.squares(gradient), "update": ours(numel, threads=threads)}
    seconds = rounds(steps, count)
    return {
        "clipping_overhead": ratio(seconds, "clipped", "unclipped") - 1,
        "norm_share": ratio(seconds, "norm", "update"),
    }


def variants(numel: int, count: int, *, threads: int) -> dict[str, float]:
    """Nanoseconds a parameter of every kernel, of one thread and of the other formats."""
    options: dict[str, dict[str, Any]] = {name: {"kernel": name} for name in native.instruction_sets()}
    options |= {
        "one_thread": {"threads": 1},
        "bf16_stochastic": {"master": "bf16_stochastic"},
        "fp32_states": {"state_bits": 32},
        "paper_2_percent": {"eight_bit_fraction": 0.02, "block_size": 4096},
    }
    steps = {name: ours(numel, **({"threads": threads} | changes)) for name, changes in options.items()}
    seconds = rounds(steps, count)
    found = {name: round(1e9 * statistics.median(each) / numel, 3) for name, each in seconds.items()}
    few = 1 << 20
    plain = rounds({"torch": ours(few, kernel="torch")}, 3)["torch"]
    return found | {"torch_operations": round(1e9 * statistics.median(plain) / few, 3)}


def bytes_per_parameter() -> float:
    """Of master, states and bf16 gradient together."""
    layout = Layout.of({"weight": (1024, 4096), "norm": (4096,)})
    unit = HybridAdamW().unit(layout, torch.zeros(layout.numel), torch.bfloat16)
    return unit.bytes / layout.numel + 2


RESIDENT = """
import ctypes, gc, torch
from pathlib import Path
from lazytrain.jobs.layout import Layout
from lazytrain.jobs.optim import HybridAdamW
def resident():
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])
optimizer = HybridAdamW()
layout = Layout.of({"weight": (5000, 4000)})
def made():
    unit = optimizer.unit(layout, torch.randn(layout.numel), torch.bfloat16)
    return unit, torch.randn(layout.numel).bfloat16()
made()[0].update(torch.zeros(layout.numel), step=1, scale=1.0, lr=1e-3)
before = resident()
units = [made() for _ in range(10)]
for unit, gradient in units:
    unit.update(gradient, step=1, scale=1.0, lr=1e-3)
print((resident() - before) / (10 * layout.numel))
"""


def resident_bytes_per_parameter() -> float:
    """What ten units of 20 M parameters add to a process of their own, gradients included, after an update.

    The C library is made to give back what it keeps of temporaries: up to 100 MB, whatever the number of parameters.
    """
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True)
    return float(done.stdout)


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "deepspeed", "bitsandbytes"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def run(*, quick: bool, threads: int, attempts: int) -> dict[str, Any]:
    """All measurements."""
    torch.set_num_threads(threads)
    load = os.getloadavg()
    sizes = (1 << 24,) if quick else (1 << 24, 1 << 28)
    attempts = 1 if quick else attempts
    rows = [quietest(lambda n=n: compare(n, 20, threads=threads, quick=quick), attempts) for n in sizes]
    result = {key: rows[-1][key] for key in ("time_over_torch_fused", "time_over_deepspeed", "bandwidth_share")}
    few = 1 << 22 if quick else 1 << 24
    parts = {
        "bitsandbytes": quietest(lambda: over_bitsandbytes(few, threads=threads), attempts),
        "clipping": quietest(lambda: clipping(1 << 24, 20, threads=threads), attempts),
    }
    result |= {key: parts["bitsandbytes"][key] for key in ("speedup_over_bitsandbytes",)}
    result |= {key: parts["clipping"][key] for key in ("clipping_overhead", "norm_share")}
    result["bytes_per_parameter"] = bytes_per_parameter()
    if not quick:
        result["resident_bytes_per_parameter"] = resident_bytes_per_parameter()
    result["rows"] = rows
    result["ns_per_parameter_of_variants"] = variants(
        1 << 22 if quick else 1 << 24, 3 if quick else 20, threads=threads
    )
    result["kernel"] = native.describe()
    result["machine"] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_before": load,
        "load_after": os.getloadavg(),
    }
    result["versions"] = versions()
    return result


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 M parameters only, fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=native.usable_threads(), help="for every optimizer")
    parser.add_argument(
        "--attempts", type=int, default=12, help="how often a part is repeated until the machine is quiet"
    )
    options = parser.parse_args()
    result = run(quick=options.quick, threads=options.threads, attempts=options.attempts)
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    for name, value in result.items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")


if __name__ == "__main__":
    main()
