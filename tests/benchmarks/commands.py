"""How long does somebody at a terminal wait?

    python tests/benchmarks/commands.py [--quick] [--json] [--busy N]

Every command runs in a process of its own, in turn, five times, with seconds of wall clock and of CPU (``_cpu_s``, all
threads): the median, and all of them.

    help            lazytrain --help
    first_plan      lazytrain plan of an 80-layer model (70 billion parameters) that was never planned for
    known_plan      the same again, its facts being known
    submit          lazytrain submit of a job where no service runs: the job file is read, the refusal is printed
    first_step      lazytrain train of the demo's model on the CPU, until the first step is done
    import          what of a first plan is not ours: transformers importing the class of a Llama, without looking for
                    garbage meanwhile

``first_plan_over_import`` is the ratio of their CPU seconds, pair by pair. ``--busy N`` keeps N cores busy beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lazytrain.jobs.tracking.metric_log import read_from
from lazytrain.schedulers.hardware import model_config

CLI = [sys.executable, "-c", "from lazytrain.platform.cli import main; main()"]
IMPORT = [
    sys.executable,
    "-c",
    "import gc; gc.disable(); from transformers.models.llama.modeling_llama import LlamaForCausalLM; gc.freeze()",
]
MAKE = "import sys; from lazytrain.platform.demo.inputs import write_inputs; print(write_inputs(sys.argv[1], 0))"
SHAPE = ("--gpu", "H800", "--batch", "32", "--length", "1024", "--host-memory", "2TiB")


class Terminal:
    """Runs commands with a home of their own, and notes what they take."""

    def __init__(self, folder: Path) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)
        self._environment = {**os.environ, "LAZYTRAIN_HOME": str(folder), "HF_HUB_OFFLINE": "1"}

    def run(self, name: str, command: list[str], code: int = 0) -> float:
        """Run a command to its end; the moment when it began, in Unix seconds."""
        began, used, moment = time.perf_counter(), _cpu_s(), time.time()
        ended = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        assert ended.returncode == code, ended.stderr
        self.times[f"{name}_s"].append(time.perf_counter() - began)
        self.times[f"{name}_cpu_s"].append(_cpu_s() - used)
        return moment


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def one_round() -> Mapping[str, list[float]]:
    """Every command once."""
    with tempfile.TemporaryDirectory(prefix="commands-") as name:
        folder = Path(name)
        terminal = Terminal(folder / "home")
        config, job = folder / "config.json", _demo_job(folder)
        config.write_text(json.dumps(model_config("llama-3.1-70b")), encoding="utf-8")
        plan = [*CLI, "plan", "--model", str(config), *SHAPE, "--json"]
        terminal.run("help", [*CLI, "--help"])
        terminal.run("import", IMPORT)
        terminal.run("first_plan", plan)
        terminal.run("known_plan", plan)
        terminal.run("submit", [*CLI, "submit", job, "--json"], code=1)
        one_step = ("--set", "train.max_steps=1", "--set", f"output.dir={name}/run")
        began = terminal.run("train", [*CLI, "train", job, "--device", "cpu", *one_step])
        terminal.times["first_step_s"].append(_first_step(folder / "run") - began)
    return terminal.times


def _demo_job(folder: Path) -> str:
    """The demo's job file, made in a process of its own: libraries that write its model print what they like."""
    made = subprocess.run([sys.executable, "-c", MAKE, str(folder)], capture_output=True, text=True, check=True)
    return made.stdout.splitlines()[-1]


def _first_step(run: Path) -> float:
    """The moment when the first step was done."""
    rows = [row for log in run.rglob("metrics.jsonl") for row, _ in read_from(log, 0)]
    return float(min(row["time"] for row in rows if "tokens_per_s" in row))


@contextlib.contextmanager
def busy(cores: int) -> Iterator[None]:
    """Other work on so many cores."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def run(rounds: int, cores: int) -> dict[str, Any]:
    """All rounds, beside other work on ``cores`` cores."""
    times: dict[str, list[float]] = defaultdict(list)
    with busy(cores):
        for _ in range(rounds):
            for name, seconds in one_round().items():
                times[name] += seconds
            print({name: round(seconds[-1], 2) for name, seconds in times.items()}, file=sys.stderr)
    pairs = zip(times["first_plan_cpu_s"], times["import_cpu_s"], strict=True)
    return {
        **{name: round(statistics.median(seconds), 3) for name, seconds in times.items()},
        "first_plan_over_import": round(statistics.median(plan / floor for plan, floor in pairs), 3),
        "all": {name: [round(second, 3) for second in seconds] for name, seconds in times.items()},
        "busy": cores,
        "load": os.getloadavg(),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "ortools")},
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round instead of five")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--busy", type=int, default=0, help="cores that other work keeps busy meanwhile")
    options = parser.parse_args()
    result = run(1 if options.quick else 5, options.busy)
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    for name, seconds in result["all"].items():
        print(f"{name:18} median {result[name]:5.2f}, {min(seconds):.2f} to {max(seconds):.2f}")


if __name__ == "__main__":
    main()
