"""The batch that the search picks, against a real probe of every batch that fits.

    python tests/benchmarks/batch_search.py [--quick] [--json] [--only 3090|h800 ...]

Llamas in float32 on an emulated RTX 3090 and H800. Links are as slow against a layer's forward as on those GPUs with
real models, memory is for the same share of what layers keep (`CASES`). An operation of the GPU takes the time that it
would take there (`Pace`), as copies over emulated links do: the CPU computes it in less, and the GPU then waits. How
long this CPU takes says little, because it does the optimizer's work and the copies too, and is another one from minute
to minute: with nothing else to do, it took a third longer for the same batch than two minutes before.

The planner knows links and memory, and is wrong about compute: it takes the GPU for half as fast again as it is, and
for as fast with few rows as with many. So predictions are off, and the search has to find out.

Every batch that a plan fits for is trained for a few steps (`platform.trial.run_probe`), in this process and in random
order. Then Ray Tune searches, with each probe in a process of its own; with ``--quick`` it is asked and told in this
process, on shallower models and fewer batches. The fastest batches of all (by their probes, and by those beside them,
because one probe says little) and the one that the search picks are then measured in turns.

- ``over_exhaustive_*``: seconds per token at the batch that the search picks, over those at the best of all, each the
  median of its turns; ``error_*`` is the standard error of this ratio.
- ``batches_tried``: the most that one of the searches for speed has tried; ``batches_tried_*`` are those of each, and
  ``probes_*`` count those that were repeated too.
- ``late_*``: by which share the GPU's operations took longer than they should, because the CPU was not done: if it is
  more than a percent, the figures are of this machine and not of the GPU.
- ``largest_*``: what the search for the largest batch has found, the largest that fits, and its probes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in every training process of ours
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lazytrain.jobs.data.rows import Rows
from lazytrain.jobs.data.store import ListStore
from lazytrain.jobs.errors import OutOfTime
from lazytrain.jobs.executor.devices.cpu import EmulatedDevice
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import Policy, lower
from lazytrain.jobs.spec import JobSpec
from lazytrain.platform.cluster.local import LocalRay
from lazytrain.platform.demo.inputs import write_inputs
from lazytrain.platform.logs import quiet_libraries
from lazytrain.platform.models import facts_of, model_of
from lazytrain.platform.planning import emulated
from lazytrain.platform.probe import measure
from lazytrain.platform.settings import Settings
from lazytrain.platform.trial import Order, Report, run_probe, standard_error
from lazytrain.platform.tuning import SearchOrder, search_batch
from lazytrain.schedulers.batch_search import Objective, Probe
from lazytrain.schedulers.costs import forward_seconds, program_seconds
from lazytrain.schedulers.guided_search import GuidedSearch
from lazytrain.schedulers.hardware import HardwareProfile, hardware
from lazytrain.schedulers.planner import Plan, plan

VOCABULARY, HEADS = 768, 4
SOLVE_SECONDS = 5.0
FINALISTS = 2
"""Of those that are fastest by their own probes, and of those that are by what is beside them too."""
OBJECTIVES: tuple[Objective, ...] = ("throughput", "max_batch")


class Case(NamedTuple):
    """A GPU, a layer, and the batch at which the ratios hold."""

    gpu: str
    width: int
    rows: int
    length: int
    forward_s: float
    """Seconds of a layer's forward."""
    load_over_forward: float
    """Seconds of a layer's load over those."""
    most: int
    """Rows up to which batches are tried."""
    products_that_fit: float
    """Share of all layers' products for which the device has room beside a step that keeps every boundary."""


CASES = {
    "3090": Case("RTX3090", 64, 6, 52, 0.015, 0.37, 24, 0.878),
    "h800": Case("H800", 64, 23, 26, 0.016, 0.94, 40, 0.791),
}
HALF_ROWS = 0.15
"""With this part of the case's rows a GPU computes half as fast as with very many."""
BELIEVED = 1.5
"""How much faster than it is the planner takes the GPU for, at the case's rows."""


@dataclass
class Pace:
    """Lets operations of an emulated GPU take as long as those of one that computes as ``profile`` says at ``rows``."""

    profile: HardwareProfile
    rows: int
    late_s: float = 0.0
    should_s: float = 0.0

    def run(self, order: Order, policy: Policy, facts: ModelFacts) -> Report:
        """A probe at this pace."""
        half = HALF_ROWS * self.rows
        slower = (self.rows + half) / self.rows * policy.micro_batch / (policy.micro_batch + half)
        program = lower(policy, facts)
        costs = program_seconds(program, facts, computing(self.profile, slower))
        seconds = {op.id: cost for op, cost in zip(program.ops, costs, strict=True)}
        ended = EmulatedDevice.compute_ended

        def in_time(device: EmulatedDevice, op: str, started: float) -> None:
            left = started + seconds[op] - time.perf_counter()
            self.late_s, self.should_s = self.late_s + max(0.0, -left), self.should_s + seconds[op]
            if left > 0:
                time.sleep(left)
            ended(device, op, started)

        with patch.object(EmulatedDevice, "compute_ended", in_time):
            return run_probe(order, policy, facts)


def computing(profile: HardwareProfile, factor: float) -> HardwareProfile:
    """The profile of a GPU that computes ``factor`` times as fast."""
    rates = {**profile.faster(factor), "operation_overhead_s": profile.operation_overhead_s / factor}
    return profile.model_copy(update=rates)


@dataclass
class Bench:
    """A case's model, rows and device, in a folder."""

    case: Case
    layers: int
    high: int
    folder: Path
    exhaustive_s: float
    """How long each batch is measured by the exhaustive search."""
    probe_s: float
    """How long a probe of the search measures."""
    profile: HardwareProfile = field(init=False)
    """What the planner knows."""
    pace: Pace = field(init=False)
    """What is."""
    _plans: dict[int, tuple[ModelFacts, Plan]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.case.width, intermediate_size=int(3.5 * self.case.width), num_hidden_layers=self.layers,
            num_attention_heads=HEADS, num_key_value_heads=2, vocab_size=VOCABULARY,
            max_position_embeddings=self.case.length,
        )  # fmt: skip
        write_inputs(self.folder, 0)  # for its tokenizer: the model is another one
        LlamaForCausalLM(config).save_pretrained(self.folder / "model")
        self.spec = JobSpec.model_validate({
            "name": "batches", "model": {"path": str(self.folder / "model"), "dtype": "float32"},
            "data": {"train": [{"path": "rows.jsonl"}]}, "train": {"learning_rate": 1e-4},
            "output": {"dir": str(self.folder)},
        })  # fmt: skip
        self.model = model_of(self.spec)
        self.profile = self._scaled()
        self.pace = Pace(computing(self.profile, 1 / BELIEVED), self.case.rows)

    def plan_batch(self, batch: int) -> tuple[ModelFacts, Plan]:
        """As the job's planner answers; a batch is planned once."""
        if batch not in self._plans:
            facts = self._facts(batch)
            try:
                answer = plan(facts, self.profile, solve_seconds=SOLVE_SECONDS)
            except OutOfTime:
                answer = Plan(feasible=False)
            self._plans[batch] = facts, answer
        return self._plans[batch]

    def order(self, seconds: float) -> Order:
        """What probes that measure for so long have in common."""
        store = ListStore()
        for _ in range(self.high):
            tokens = torch.randint(0, VOCABULARY, (self.case.length,)).tolist()
            store.append(tokens, [(1, self.case.length)], "", "")
        return Order(spec=self.spec, device=emulated(self.profile), rows=Rows(store), seconds=seconds)

    def _facts(self, batch: int) -> ModelFacts:
        return facts_of(self.model, batch=batch, length=self.case.length, dtype="float32")

    def _scaled(self) -> HardwareProfile:
        """The profile of a node that emulates the GPU, with links and memory for this model."""
        base = hardware(self.case.gpu).model_copy(update={"device": "emulated"})
        node, facts = measure(base).profile, self._facts(self.case.rows)
        layer = facts.layers[0]
        kept = Policy.from_homes(facts, ["gpu"] * (self.layers + 1)).model_copy(update={"weight_slots": 3})
        rate = layer.weight_bytes / (self.case.load_over_forward * self.case.forward_s)
        room = int(self.case.products_that_fit * self.layers * layer.saved_matmul_bytes)
        memory = lower(kept, facts).peak_bytes("gpu") + room
        links = {"h2d_bytes_s": rate, "d2h_bytes_s": rate, "gpu_memory_bytes": memory}
        factor = BELIEVED * forward_seconds(layer, facts, node) / self.case.forward_s
        return computing(node.model_copy(update=links), factor)


def exhaustive(bench: Bench) -> dict[int, float]:
    """Tokens per second of every batch that fits."""
    batches = [batch for batch in range(1, bench.high + 1) if bench.plan_batch(batch)[1].policy is not None]
    order = random.Random(0).sample(batches, len(batches))  # what else the machine does is not at one end of the range
    return {batch: rate for batch in order if (rate := probed(bench, batch, bench.exhaustive_s)) > 0}


def finalists(known: dict[int, float]) -> set[int]:
    """The fastest by their own probes, and by the median of theirs and those of the batches beside them."""
    beside = {
        batch: statistics.median(known[other] for other in (batch - 1, batch, batch + 1) if other in known)
        for batch in known
    }
    return {batch for rates in (known, beside) for batch in sorted(rates, key=lambda b: -rates[b])[:FINALISTS]}


def final(bench: Bench, batches: set[int], turns: int) -> dict[int, list[float]]:
    """Tokens per second of these batches in so many turns."""
    found: dict[int, list[float]] = {batch: [] for batch in batches}
    for turn in range(turns):
        for batch in random.Random(turn).sample(sorted(found), len(found)):
            found[batch].append(probed(bench, batch, bench.exhaustive_s))
    return found


def probed(bench: Bench, batch: int, seconds: float) -> float:
    """Tokens per second of a real probe in this process; 0 if it did not fit."""
    facts, answer = bench.plan_batch(batch)
    assert answer.policy is not None
    report = bench.pace.run(bench.order(seconds), answer.policy, facts)
    return report.tokens_per_s if report.fits else 0.0


class Picked(NamedTuple):
    """What a search has picked, with its probes as (batch, tokens per second, 0 where it did not fit)."""

    batch: int
    probes: list[tuple[int, float]]


def with_tune(bench: Bench, objective: Objective) -> Picked:
    """The search as the service makes it; it needs a Ray."""
    order = SearchOrder(
        job_id=f"bench-{bench.case.gpu}-{objective}", plan_batch=bench.plan_batch,
        run=partial(bench.pace.run, bench.order(bench.probe_s)),
        low=1, high=bench.high, objective=objective, directory=bench.folder / "tune",
    )  # fmt: skip
    search = search_batch(order)
    return Picked(search.best.batch, [(trial.batch, trial.report.tokens_per_s) for trial in search.trials])


def asked_here(bench: Bench, objective: Objective) -> Picked:
    """The same questions, answered in this process."""

    def expect(batch: int) -> float:
        predicted = bench.plan_batch(batch)[1].predicted
        return predicted.tokens_per_s if predicted is not None else 0.0

    search, probes = GuidedSearch(1, bench.high, objective, expect), list[tuple[int, float]]()
    while (batch := search.ask()) is not None:
        facts, answer = bench.plan_batch(batch)
        assert answer.policy is not None
        report = bench.pace.run(bench.order(bench.probe_s), answer.policy, facts)
        probes.append((batch, report.tokens_per_s))
        search.tell(batch, Probe(report.fits, report.tokens_per_s, spread=report.spread))
    return Picked(search.best.batch, probes)


def judge(bench: Bench, name: str, turns: int, *, tune: bool) -> dict[str, Any]:
    """Both searches on one GPU, beside every batch."""
    began = time.monotonic()
    known = exhaustive(bench)
    took_s = time.monotonic() - began
    search = with_tune if tune else asked_here
    fastest, largest = (search(bench, objective) for objective in OBJECTIVES)
    turned = final(bench, finalists(known) | {fastest.batch}, turns)
    last = {batch: statistics.median(rates) for batch, rates in turned.items()}
    best = max(last, key=lambda batch: last[batch])
    errors = [standard_error(turned[batch]) for batch in (best, fastest.batch)]
    return {
        f"over_exhaustive_{name}": last[best] / last[fastest.batch],
        f"error_{name}": 0.0 if best == fastest.batch else math.hypot(*errors),
        f"batches_tried_{name}": len({batch for batch, _ in fastest.probes}),
        f"probes_{name}": len(fastest.probes),
        f"late_{name}": bench.pace.late_s / bench.pace.should_s,
        f"picked_{name}": fastest.batch,
        f"best_{name}": best,
        f"tried_{name}": fastest.probes,
        f"largest_{name}": {"picked": largest.batch, "fits": max(known), "tried": largest.probes},
        f"last_turns_{name}": {str(b): [round(rate, 1) for rate in rates] for b, rates in sorted(turned.items())},
        f"tokens_per_s_{name}": {str(batch): round(rate, 1) for batch, rate in sorted(known.items())},
        f"predicted_{name}": {
            str(batch): round(answer.predicted.tokens_per_s, 1)
            for batch, (_, answer) in sorted(bench._plans.items())
            if answer.predicted is not None
        },
        f"link_bytes_s_{name}": bench.profile.h2d_bytes_s,
        f"device_bytes_{name}": bench.profile.gpu_memory_bytes,
        f"exhaustive_s_{name}": took_s,
    }


def run(names: list[str], *, quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    layers, turns, exhaustive_s, probe_s = (4, 1, 0.1, 0.3) if quick else (6, 3, 0.3, 4.0)
    with tempfile.TemporaryDirectory() as folder:
        ray = None if quick else LocalRay(Settings(home=Path(folder), ray_auth="disabled"), kind="bench", cpus=1)
        for name in names:
            case = CASES[name]
            high = min(12, case.most) if quick else case.most
            place = Path(folder) / name
            place.mkdir()
            bench = Bench(case, layers, high, place, exhaustive_s, probe_s)
            found |= judge(bench, name, turns, tune=not quick)
            print(
                json.dumps({key: found[key] for key in found if not key.startswith(("tokens", "pred"))}),
                file=sys.stderr,
            )
        if ray is not None:
            ray.close()
    return {
        "batches_tried": max(found[f"batches_tried_{name}"] for name in names),
        **found,
        "layers": layers,
        "turns": turns,
        "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()[0]},
        "versions": {name: version(name) for name in ("torch", "ray", "ortools")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few batches, without Ray, in 50 seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="only these GPUs")
    options = parser.parse_args()
    quiet_libraries()
    result = run(options.only, quick=options.quick)
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    for name in options.only:
        print(
            f"{name}: batch {result[f'picked_{name}']} after {result[f'probes_{name}']} probes, best "
            f"{result[f'best_{name}']}: {result[f'over_exhaustive_{name}']:.3f} of its time per token "
            f"(standard error {result[f'error_{name}']:.3f})"
        )


if __name__ == "__main__":
    main()
